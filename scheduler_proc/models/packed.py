"""The Llama family with int8 or int4 weights on a CPU: one native call per step.

Built by the loader from a filled LlamaForCausalLM, whose plain weights it uses up, and from a GGUF
file's own blocks where the native formats hold them exactly. Called by the runner like any model.
"""

from collections.abc import Mapping, Sequence
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
from ...kernels.quantised_linear import Kind, PackedWeight, Rows, pack
from .config import ModelSpec
from .forward_batch import ForwardBatch
from .llama import LlamaForCausalLM, Slots
from .lora import LoRAAdapter

_GROUP_OF = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up"),
}
_PARTS = {"qkv": 3, "gate_up": 2}
ExactRows = Mapping[str, Rows]  # checkpoint name -> the file's own quantised rows


class PackedLlama:
    def __init__(
        self, spec: ModelSpec, weights: DecoderWeights, cos_sin: torch.Tensor, threads: int
    ) -> None:
        self.spec = spec
        self.weights = weights
        self._threads = threads
        self._cpus: Sequence[int] = ()
        self._decoder: Decoder | None = None  # made when the caches are known, at the first step
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
        """Of its linear maps and vocabulary."""
        weights = self.weights
        maps = [map for one in weights.layers for map in (one.qkv, one.o, one.gate_up, one.down)]
        heads = {id(one): one for one in (weights.embedding, weights.head)}  # may be the same
        return sum(one.nbytes for one in (*maps, *heads.values()))

    def pin(self, cpus: Sequence[int]) -> None:
        """Before the first step: a core for each thread. The one that calls `forward` is pinned."""
        self._cpus = cpus

    def reset(self) -> None:
        """Forget the caches of earlier steps: the next step brings others."""
        self._decoder = None

    def profile(self) -> dict[str, float]:
        """Seconds by phase since the last call, which starts the counting; after a first step."""
        return {} if self._decoder is None else self._decoder.profile()

    def resident(self, adapter: LoRAAdapter) -> DecoderAdapter:
        """The form in which `forward` takes an adapter: a copy in bfloat16."""
        factors = {key: (module.a, module.b) for key, module in adapter.modules.items()}
        return DecoderAdapter(self.shape, self.spec.num_layers, factors)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Logits [S, vocab] float32 of the tokens at `batch.logit_indices`."""
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


def whole_groups(exact: ExactRows) -> dict[str, Rows]:
    """Those whose map can be packed from the file's blocks: all its parts have one format."""
    groups: dict[str, list[str]] = {}
    for name in exact:
        layer, _, part = name.removesuffix(".weight").rpartition(".")
        groups.setdefault(f"{layer}.{_GROUP_OF.get(part, part)}", []).append(name)
    return {
        name: exact[name]
        for group, names in groups.items()
        for name in names
        if len(names) == _PARTS.get(group.rpartition(".")[2], 1)
        and len({exact[one].format for one in names}) == 1
    }


def pack_model(model: LlamaForCausalLM, kind: Kind, exact: ExactRows, threads: int) -> PackedLlama:
    """Packs a filled model layer by layer, giving up its plain weights on the way."""
    packer = _Packer(model.spec, model.weight_slots, kind, exact, threads, Arena())
    cos_sin = model.cos_sin
    layers = []
    for index in range(model.spec.num_layers):
        layers.append(packer.layer(f"model.layers.{index}"))
        model.layers[index].drop_weights()
    embedding = packer.linear("model", ["embed_tokens"])
    head = embedding if model.spec.tied else packer.linear("", ["lm_head"])
    weights = DecoderWeights(layers, embedding, head, packer.norm("model.norm"))
    return PackedLlama(model.spec, weights, cos_sin, threads)


@dataclass(slots=True)
class _Packer:
    spec: ModelSpec
    slots: Slots
    kind: Kind
    exact: ExactRows
    threads: int
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
        """One packed weight from parts below each other, or from gate and up in turns."""
        names = [f"{prefix}.{part}".removeprefix(".") for part in parts]
        rows = self._rows([f"{name}.weight" for name in names])
        biases = [self.slots.pop(f"{name}.bias") for name in names] if bias else None
        if not gated:
            values = torch.cat([part.values for part in rows])
            rows = [Rows(values, rows[0].k, rows[0].format)]
            biases = None if biases is None else [torch.cat(biases)]
        # A vocabulary in 4 bits costs more quality than it saves: float embeddings go to int8.
        kind: Kind = "int8" if parts[0] in ("embed_tokens", "lm_head") else self.kind
        return pack(
            rows, kind, alternate=gated, biases=biases, threads=self.threads, arena=self.arena
        )

    def norm(self, name: str) -> torch.Tensor:
        return self.slots.pop(f"{name}.weight").float().contiguous()

    def _rows(self, names: list[str]) -> list[Rows]:
        """The file's own blocks where they are to be kept, else the plain weights."""
        plain = [self.slots.pop(name) for name in names]
        if names[0] in self.exact:
            return [self.exact[name] for name in names]
        return [Rows(weight, weight.shape[1]) for weight in plain]
