"""The Llama family with int8 or int4 weights on a CPU: one native call per step.

Built by the loader, which packs piece by piece, so the weights are never in memory as floats all
at once. GGUF blocks are kept where a packed format holds them exactly. Called by the runner like
any model; requests and sampling must not enter.
"""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from ...kernels.cpu.arena import Arena
from ...kernels.decoder import (
    Decoder,
    DecoderLayer,
    DecoderShape,
    DecoderStep,
    DecoderWeights,
)
from ...kernels.decoder_adapter import DecoderAdapter
from ...kernels.quantised_linear import (
    BLOCK_ROWS,
    Kind,
    PackedWeight,
    Rows,
    StreamedRows,
    pack,
)
from .checkpoint import Checkpoint, Progress, RowReader
from .config import ModelSpec
from .forward_batch import ForwardBatch
from .layers import cos_sin_table
from .lora import LoRAAdapter

# GGUF types that each mode keeps without quantising again
_EXACT_FORMATS = {"int4": {"Q4_0", "Q4_1", "Q8_0"}, "int8": {"Q8_0"}}


class PackedLlama:
    def __init__(
        self, spec: ModelSpec, weights: DecoderWeights, cos_sin: torch.Tensor, threads: int
    ) -> None:
        self.spec = spec
        self.weights = weights
        self._threads = threads
        self._cpus: Sequence[int] = ()
        self._decoder: Decoder | None = None  # the first step brings the caches it needs
        self.shape = DecoderShape(
            hidden=spec.hidden_size,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            intermediate=spec.intermediate_size,
            vocab=spec.vocab_size,
            eps=spec.rms_norm_eps,
            cos_sin=cos_sin,
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the packed linear maps, embedding and head."""
        weights = self.weights
        maps = [map for one in weights.layers for map in (one.qkv, one.o, one.gate_up, one.down)]
        heads = {id(one): one for one in (weights.embedding, weights.head)}  # may be the same
        return sum(one.nbytes for one in (*maps, *heads.values()))

    def pin(self, cpus: Sequence[int]) -> None:
        """Pin each thread, from the caller of `forward` on, to a core. Call before stepping."""
        self._cpus = cpus

    def reset(self) -> None:
        """Drop the decoder that points into the caches; the next step may bring other caches."""
        self._decoder = None

    def profile(self) -> dict[str, float]:
        """Return seconds per phase since the last call; {} before the first step."""
        return {} if self._decoder is None else self._decoder.profile()

    def resident(self, adapter: LoRAAdapter) -> DecoderAdapter:
        """Return the form of an adapter that `forward` takes: a packed bfloat16 copy."""
        factors = {key: (module.a, module.b) for key, module in adapter.modules.items()}
        return DecoderAdapter(self.shape, self.spec.num_layers, factors)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Compute logits [S, vocab] float32 of the tokens at `batch.logit_indices`."""
        if self._decoder is None:
            self._decoder = Decoder(
                self.shape,
                self.weights,
                (batch.k_cache, batch.v_cache),
                page_size=batch.page_size,
                threads=self._threads,
            )
            if self._cpus:
                self._decoder.pin(self._cpus)
        step = DecoderStep(
            prefix_lens=np.array(batch.prefix_lens, dtype=np.int32),
            extend_lens=np.array(batch.extend_lens, dtype=np.int32),
            rows=np.array(batch.rows, dtype=np.int32),
            page_table=batch.page_table,
            input_ids=batch.input_ids.numpy().astype(np.int32),
            samples=batch.logit_indices.numpy().astype(np.int32),
            adapters=cast("Sequence[DecoderAdapter | None]", batch.adapters),
        )
        return self._decoder.forward(step)


def pack_model(
    spec: ModelSpec, checkpoint: Checkpoint, kind: Kind, threads: int, progress: Progress
) -> PackedLlama:
    """Read and pack all weights of a checkpoint. Call check_tensors first."""
    with closing(RowReader(checkpoint, spec.head_dim)) as reader:
        packer = _Packer(spec, checkpoint, reader, kind, threads, progress, Arena())
        layers = [packer.layer(f"model.layers.{index}") for index in range(spec.num_layers)]
        embedding = packer.linear("model", ["embed_tokens"])
        head = embedding if spec.tied else packer.linear("", ["lm_head"])
        weights = DecoderWeights(layers, embedding, head, packer.norm("model.norm"))
    cos_sin = cos_sin_table(spec.rope, spec.head_dim, spec.context_length, "cpu")
    return PackedLlama(spec, weights, cos_sin, threads)


@dataclass(slots=True)
class _Packer:
    spec: ModelSpec
    checkpoint: Checkpoint
    reader: RowReader
    kind: Kind
    threads: int
    progress: Progress
    arena: Arena

    def layer(self, prefix: str) -> DecoderLayer:
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        spec = self.spec
        return DecoderLayer(
            qkv=self.linear(attention, ["q_proj", "k_proj", "v_proj"], bias=spec.qkv_bias),
            o=self.linear(attention, ["o_proj"], bias=spec.o_bias),
            gate_up=self.linear(mlp, ["gate_proj", "up_proj"], bias=spec.mlp_bias, gated=True),
            down=self.linear(mlp, ["down_proj"], bias=spec.mlp_bias),
            input_norm=self.norm(f"{prefix}.input_layernorm"),
            post_norm=self.norm(f"{prefix}.post_attention_layernorm"),
            q_norm=self.norm(f"{attention}.q_norm") if spec.qk_norm else None,
            k_norm=self.norm(f"{attention}.k_norm") if spec.qk_norm else None,
        )

    def linear(
        self, prefix: str, parts: list[str], *, bias: bool = False, gated: bool = False
    ) -> PackedWeight:
        """Pack one weight from stacked parts, or from alternating gate and up blocks."""
        names = [f"{prefix}.{part}".removeprefix(".") for part in parts]
        # A vocabulary in 4 bits costs more quality than it saves: float embeddings go to int8.
        kind: Kind = "int8" if parts[0] in ("embed_tokens", "lm_head") else self.kind
        rows: Sequence[Rows | StreamedRows] = self._rows([f"{name}.weight" for name in names])
        biases = [self._vector(f"{name}.bias") for name in names] if bias else None
        if not gated and any(part.n % BLOCK_ROWS for part in rows[:-1]):
            values = torch.cat([piece.clone() for part in rows for piece in part.pieces])
            rows = [Rows(values, rows[0].k, rows[0].format)]
            biases = None if biases is None else [torch.cat(biases)]
        weight = pack(
            rows, kind, alternate=gated, biases=biases, threads=self.threads, arena=self.arena
        )
        self.progress(weight.n * weight.k)
        return weight

    def norm(self, name: str) -> torch.Tensor:
        return self._vector(f"{name}.weight")

    def _vector(self, name: str) -> torch.Tensor:
        (size,) = self.checkpoint.shape(name)
        return self.checkpoint.read(name, (slice(0, size),)).float().clone()

    def _rows(self, names: list[str]) -> list[StreamedRows]:
        """Return the file's blocks if all parts share a format kept in this mode, else floats."""
        blocks = [self.checkpoint.blocks(name) for name in names]
        formats = {"" if one is None else one.format for one in blocks}
        if len(formats) == 1 and formats <= _EXACT_FORMATS[self.kind]:
            return [one for one in blocks if one is not None]
        return [self.reader.rows(name) for name in names]
