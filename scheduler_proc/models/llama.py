"""Decoder of the Llama family: Llama, Mistral, Qwen2, Qwen3 and SmolLM differ by ModelSpec alone.

Built by the loader, called by the runner. `forward` reads only StepInputs: requests, pages and
sampling must not enter.
"""

import torch

from ...kernels.rotary_kv_store import rotary_kv_store
from ...kernels.silu_mul import silu_mul
from .config import ModelSpec
from .forward_batch import StepInputs
from .layers import Linear, RMSNorm, cos_sin_table
from .lora import HEAD, LoRAAdapter, StepLoRA
from .parallel import WHOLE, Cut, Shard, kv_cut, local_spec

Slots = dict[str, torch.Tensor]  # checkpoint name -> view of the parameter to fill


class _Maker:
    """Allocates parameters and records which checkpoint tensor fills which of their rows."""

    def __init__(self, dtype: torch.dtype, device: str, shard: Shard) -> None:
        self._dtype = dtype
        self._device = device
        self.shard = shard
        self.slots: Slots = {}
        self.cuts: dict[str, Cut] = {}

    def empty(self, name: str, *shape: int) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        self.slots[name] = tensor
        return tensor

    def rows(self, name: str, rows: Cut, inputs: int) -> torch.Tensor:
        self.cuts[name] = rows
        return self.empty(name, rows.length, inputs)

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        return RMSNorm(self.empty(f"{name}.weight", size), eps)

    def linear(self, prefix: str, parts: dict[str, Cut], inputs: int, *, bias: bool) -> Linear:
        """Make one linear map whose output rows are the named parts, stacked."""
        rows = sum(part.length for part in parts.values())
        weight = torch.empty(rows, inputs, dtype=self._dtype, device=self._device)
        bias_row = torch.empty(rows, dtype=self._dtype, device=self._device) if bias else None
        start = 0
        for name, part in parts.items():
            end = start + part.length
            self.slots[f"{prefix}.{name}.weight"] = weight[start:end]
            self.cuts[f"{prefix}.{name}.weight"] = part
            if bias_row is not None:
                self.slots[f"{prefix}.{name}.bias"] = bias_row[start:end]
                self.cuts[f"{prefix}.{name}.bias"] = part
            start = end
        return Linear(weight, bias_row)

    def summed(self, name: str, rows: int, inputs: int, *, bias: bool) -> Linear:
        """Make a linear map whose `inputs` are split over the ranks."""
        part = self.shard.cut(1, inputs)
        self.cuts[f"{name}.weight"] = part
        weight = self.empty(f"{name}.weight", rows, part.length)
        return Linear(weight, self.empty(f"{name}.bias", rows) if bias else None, self.shard)


class _Attention:
    def __init__(self, spec: ModelSpec, make: _Maker, prefix: str, cos_sin: torch.Tensor) -> None:
        kv = kv_cut(spec, make.shard)
        parts = {"q": make.shard.cut(0, spec.q_size), "k": kv, "v": kv}
        self._parts = {name: part.length for name, part in parts.items()}
        projections = {f"{name}_proj": part for name, part in parts.items()}
        self.qkv_proj = make.linear(prefix, projections, spec.hidden_size, bias=spec.qkv_bias)
        self.o_proj = make.summed(
            f"{prefix}.o_proj", spec.hidden_size, spec.q_size, bias=spec.o_bias
        )
        self.q_norm = self.k_norm = None
        if spec.qk_norm:
            self.q_norm = make.norm(f"{prefix}.q_norm", spec.head_dim, spec.rms_norm_eps)
            self.k_norm = make.norm(f"{prefix}.k_norm", spec.head_dim, spec.rms_norm_eps)
        self._cos_sin = cos_sin
        self._heads = [part.length // spec.head_dim for part in parts.values()]
        self._head_dim = spec.head_dim

    def __call__(
        self, x: torch.Tensor, batch: StepInputs, layer: int, lora: StepLoRA
    ) -> torch.Tensor:
        """Attend: x [T, hidden] -> [T, hidden]. Stores the new keys and values of this layer."""
        qkv = self.qkv_proj(x)
        lora.add(qkv, x, layer, self._parts)
        heads = qkv.view(x.shape[0], -1, self._head_dim)
        q, k, _ = torch.split(heads, self._heads, dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            self.q_norm.in_place(q)
            self.k_norm.in_place(k)
        rotary_kv_store(
            heads,
            q.shape[1],
            k.shape[1],
            batch.positions,
            self._cos_sin,
            batch.k_cache[layer],
            batch.v_cache[layer],
            batch.out_cache_loc,
        )
        out = batch.attend(q, layer, self._head_dim**-0.5).view(x.shape[0], -1)
        y = self.o_proj(out)
        lora.add(y, out, layer, {"o": y.shape[1]})
        return y


class _DecoderLayer:
    def __init__(self, spec: ModelSpec, make: _Maker, prefix: str, cos_sin: torch.Tensor) -> None:
        hidden, inner, eps = spec.hidden_size, spec.intermediate_size, spec.rms_norm_eps
        self.input_norm = make.norm(f"{prefix}.input_layernorm", hidden, eps)
        self.attention = _Attention(spec, make, f"{prefix}.self_attn", cos_sin)
        self.post_attention_norm = make.norm(f"{prefix}.post_attention_layernorm", hidden, eps)
        mlp, bias = f"{prefix}.mlp", spec.mlp_bias
        parts = dict.fromkeys(("gate_proj", "up_proj"), make.shard.cut(0, inner))
        self.gate_up_proj = make.linear(mlp, parts, hidden, bias=bias)
        self.down_proj = make.summed(f"{mlp}.down_proj", hidden, inner, bias=bias)

    def mlp(self, x: torch.Tensor, layer: int, lora: StepLoRA) -> torch.Tensor:
        gate_up = self.gate_up_proj(x)
        lora.add(gate_up, x, layer, dict.fromkeys(("gate", "up"), gate_up.shape[1] // 2))
        inner = silu_mul(gate_up)
        y = self.down_proj(inner)
        lora.add(y, inner, layer, {"down": y.shape[1]})
        return y

    def linears(self) -> tuple[Linear, ...]:
        attention = self.attention
        return attention.qkv_proj, attention.o_proj, self.gate_up_proj, self.down_proj


class LlamaForCausalLM:
    """A model, or one rank's part. Fill its empty `weight_slots`, then call `finish`.

    `spec` describes the rank's part, except that the vocabulary is whole.
    """

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: str, shard: Shard = WHOLE
    ) -> None:
        """Allocate; `spec` is the whole model's. Raises ModelError if the ranks cannot split it."""
        self.spec = local_spec(spec, shard)
        self.dtype = dtype
        self.shard = shard
        make = _Maker(dtype, device, shard)
        self.embedding = make.empty("model.embed_tokens.weight", spec.vocab_size, spec.hidden_size)
        self.cos_sin = cos_sin_table(spec.rope, spec.head_dim, spec.context_length, device)
        self.layers = [
            _DecoderLayer(spec, make, f"model.layers.{index}", self.cos_sin)
            for index in range(spec.num_layers)
        ]
        self.norm = make.norm("model.norm", spec.hidden_size, spec.rms_norm_eps)
        # If the ranks do not divide the vocabulary, each computes the whole head.
        self._head_shard = WHOLE if spec.vocab_size % shard.size else shard
        vocab = self._head_shard.cut(0, spec.vocab_size)
        if spec.tied:
            self.lm_head = Linear(vocab.of(self.embedding))
        else:
            self.lm_head = Linear(make.rows("lm_head.weight", vocab, spec.hidden_size))
        self._slots: Slots | None = make.slots
        # The part of a checkpoint tensor that a slot holds; whole tensors are not listed.
        self.cuts = {name: cut for name, cut in make.cuts.items() if cut.length < cut.whole}

    @property
    def weight_slots(self) -> Slots:
        """Views to copy each checkpoint tensor into. Raises RuntimeError after `finish`."""
        if self._slots is None:
            raise RuntimeError("the weights of this model are final")
        return self._slots

    def checkpoint_shape(self, name: str) -> list[int]:
        """Return the shape of the whole checkpoint tensor of which this slot holds a part."""
        shape = list(self.weight_slots[name].shape)
        return self.cuts[name].whole_shape(shape) if name in self.cuts else shape

    def finish(self) -> None:
        """Lay the weights out for speed. Call once, when every slot is filled."""
        self._slots = None  # its views would keep the plain weights alive
        for layer in self.layers:
            for linear in layer.linears():
                linear.pack()
        self.lm_head.pack()

    def resident(self, adapter: LoRAAdapter) -> LoRAAdapter:
        """Return the form of an adapter that `forward` takes: the adapter itself."""
        return adapter

    @torch.no_grad()
    def forward(self, batch: StepInputs) -> torch.Tensor:
        """Compute logits [S, vocab] float32 of the tokens at `batch.logit_indices`."""
        lora = batch.lora()
        x = residual = batch.embed(self.embedding, lora)  # [T, hidden]
        for index, layer in enumerate(self.layers):
            x = layer.input_norm(x) if index == 0 else layer.input_norm(x, residual)
            x = layer.attention(x, batch, index, lora)
            x = layer.post_attention_norm(x, residual)
            x = layer.mlp(x, index, lora)
        wanted = batch.logit_indices
        x = self.norm(x.index_select(0, wanted), residual.index_select(0, wanted))
        logits = self._head_shard.gather(self.lm_head(x))
        lora.sampled(wanted).add(logits, x, HEAD[0], {HEAD[1]: logits.shape[1]})
        return logits.float()
