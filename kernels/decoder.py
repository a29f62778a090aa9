"""A whole decoder stack in one native call per step: embedding, layers, final norm, head.

Norms, rotary embedding, residuals and softmax run in float32; linear maps use quantised_linear.py.
Keys and values are paged, in bf16, or in int8 with one scale per token and head. Attention merges
pieces of 256 keys in order, so a token's logits are bitwise the same alone and in any batch, in a
decode, a chunk or a whole prompt, and from cached pages. Requests that share pages read them once
per step. Called by models/packed.py.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from .cpu import native
from .quantised_linear import PackedWeight

Ints = NDArray[np.int32]
_PIECE = 256  # keys
_BLOCK = 16  # tokens in one block of the int8 cache
_MOST_CPUS = 1024  # size of the C library's cpu_set_t
_LANES = 16  # the cache pads head_dim to a multiple of this


@dataclass(slots=True, frozen=True)
class DecoderShape:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    eps: float
    cos_sin: torch.Tensor  # [positions, head_dim] float32: cosines, then sines


@dataclass(slots=True, frozen=True)
class DecoderLayer:
    qkv: PackedWeight
    o: PackedWeight
    gate_up: PackedWeight  # gate and up blocks alternate
    down: PackedWeight
    input_norm: torch.Tensor  # [hidden] float32
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None = None  # [head_dim]
    k_norm: torch.Tensor | None = None


@dataclass(slots=True, frozen=True)
class DecoderWeights:
    layers: Sequence[DecoderLayer]
    embedding: PackedWeight  # the same object as `head` when tied
    head: PackedWeight
    final_norm: torch.Tensor


class Adapter(Protocol):
    """The part of DecoderAdapter (decoder_adapter.py) that a step reads."""

    @property
    def rank(self) -> int: ...

    @property
    def struct(self) -> native.LoraAdapter: ...


@dataclass(slots=True, frozen=True)
class DecoderStep:
    """One step of B requests with T new tokens, of which S need logits. Arrays are int32.

    prefix_lens, extend_lens and rows are [B]; rows index page_table.
    """

    prefix_lens: Ints
    extend_lens: Ints
    rows: Ints
    page_table: torch.Tensor  # [rows, pages] int32
    input_ids: Ints  # [T]
    samples: Ints  # [S], indices into the T tokens
    adapters: Sequence[Adapter | None] = ()  # [B], or empty without adapters


def cache_width(head_dim: int, dtype: torch.dtype) -> int:
    """Return the KV cache elements per token and head; int8 adds four for a float32 scale."""
    padded = -(-head_dim // _LANES) * _LANES
    return padded + 4 if dtype is torch.int8 else padded


def check_page_size(page_size: int, dtype: torch.dtype) -> None:
    """Raise ValueError if a cache of `dtype` does not support `page_size` (in tokens)."""
    if _PIECE % page_size:  # a piece must end with a page
        raise ValueError(
            f"--page-size {page_size} is not supported by the int8 and int4 modes: "
            f"take a power of two up to {_PIECE}"
        )
    if dtype is torch.int8 and page_size < _BLOCK:
        raise ValueError(
            f"--page-size {page_size} is not supported with --kv-cache-dtype int8: "
            f"take a power of two from {_BLOCK} to {_PIECE}"
        )


class Decoder:
    """A native engine that points into weights and caches and keeps both alive. Not thread-safe.

    Per layer a cache is contiguous bfloat16 or int8 [pages * page_size, kv_heads,
    cache_width(head_dim, dtype)]; the order inside a page is private to the native library.
    """

    def __init__(
        self,
        shape: DecoderShape,
        weights: DecoderWeights,
        caches: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
        *,
        page_size: int,
        threads: int,
        isa: int | None = None,
    ) -> None:
        check_page_size(page_size, caches[0][0].dtype)
        self._library = native.load()
        self._shape = shape
        self._threads = threads
        self._keep_alive = (shape, weights, caches)
        layers = (native.Layer * len(weights.layers))(
            *(_layer(layer, k, v) for layer, k, v in zip(weights.layers, *caches, strict=True))
        )
        numbers = native.Shape(
            shape.hidden,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.intermediate,
            shape.vocab,
            len(weights.layers),
            page_size,
            threads,
            native.KV_INT8 if caches[0][0].dtype == torch.int8 else native.KV_BF16,
            shape.eps,
            shape.cos_sin.data_ptr(),
        )
        self._engine = self._library.tl_engine_new(
            ctypes.byref(numbers),
            layers,
            ctypes.byref(weights.embedding.struct()),
            ctypes.byref(weights.head.struct()),
            weights.final_norm.data_ptr(),
            self._library.tl_best_isa() if isa is None else isa,
        )

    def pin(self, cpus: Sequence[int]) -> None:
        """Pin thread i to core cpus[i] from the next step on; thread 0 is the caller's.

        Raises ValueError unless there is one valid core number per thread.
        """
        if len(cpus) != self._threads or min(cpus) < 0 or max(cpus) >= _MOST_CPUS:
            raise ValueError(f"{len(cpus)} cores for {self._threads} threads: {list(cpus)}")
        self._library.tl_engine_pin(self._engine, (ctypes.c_int32 * len(cpus))(*cpus))

    @property
    def instructions(self) -> str:
        """Instruction sets of the linear maps and of attention, for the log."""
        linear = self._library.tl_engine_linear(self._engine).decode()
        return f"{linear}, {self._library.tl_engine_attention(self._engine).decode()}"

    def forward(self, step: DecoderStep) -> torch.Tensor:
        """Run one step; return logits [S, vocab] float32."""
        # Padding keeps the row stride off powers of two, where rows would share cache sets.
        padded = self._shape.vocab + native.BLOCK
        logits = torch.empty(len(step.samples), padded)[:, : self._shape.vocab]
        used = [one for one in step.adapters if one is not None]
        adapters = (ctypes.c_void_p * len(step.adapters))(
            *(None if one is None else ctypes.addressof(one.struct) for one in step.adapters)
        )
        native_step = native.Step(
            len(step.rows),
            len(step.input_ids),
            len(step.samples),
            step.prefix_lens.ctypes.data,
            step.extend_lens.ctypes.data,
            step.rows.ctypes.data,
            step.page_table.data_ptr(),
            step.page_table.stride(0),
            step.input_ids.ctypes.data,
            step.samples.ctypes.data,
            logits.data_ptr(),
            padded,
            ctypes.addressof(adapters) if used else None,
            max((one.rank for one in used), default=0),
        )
        self._library.tl_engine_forward(self._engine, ctypes.byref(native_step))
        return logits

    def profile(self) -> dict[str, float]:
        """Return seconds per phase since the last call. The first call only starts the counters."""
        seconds = np.zeros(len(native.PHASES))
        self._library.tl_engine_profile(self._engine, seconds.ctypes.data)
        return dict(zip(native.PHASES, seconds.tolist(), strict=True))

    def __del__(self) -> None:
        if engine := getattr(self, "_engine", None):
            self._library.tl_engine_free(engine)


def _layer(layer: DecoderLayer, k_cache: torch.Tensor, v_cache: torch.Tensor) -> native.Layer:
    def pointer(tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else tensor.data_ptr()

    return native.Layer(
        layer.qkv.struct(),
        layer.o.struct(),
        layer.gate_up.struct(),
        layer.down.struct(),
        layer.input_norm.data_ptr(),
        layer.post_norm.data_ptr(),
        pointer(layer.q_norm),
        pointer(layer.k_norm),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
    )
