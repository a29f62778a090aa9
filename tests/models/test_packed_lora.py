"""Adapters in the int8 and int4 decoders: as if merged, and the same bits in any crowd."""

import ctypes
import mmap
from collections.abc import Callable
from itertools import product

import pytest
import torch
import transformers
from models.test_packed import Checkpoint, PackedPool, tokens

from tokenloom.kernels.cpu import arena, native
from tokenloom.kernels.cpu.arena import map_memory
from tokenloom.kernels.decoder import Decoder, DecoderShape
from tokenloom.kernels.decoder_adapter import DecoderAdapter, Factors, Key
from tokenloom.scheduler_proc.models import packed as packed_module
from tokenloom.scheduler_proc.models.packed import PackedLlama

Load = Callable[..., PackedLlama]
HF_NAMES = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}
CONFIG = {"hidden_size": 96, "max_position_embeddings": 2048, "initializer_range": 0.08}


def linear_of(model: transformers.PreTrainedModel, key: Key) -> torch.nn.Module:
    layer, name = key
    if layer < 0:
        return model.get_input_embeddings() if name == "embed" else model.lm_head
    return model.get_submodule(f"model.layers.{layer}.{HF_NAMES[name]}")


def random_factors(
    model: transformers.PreTrainedModel, keys: list[Key], rank: int
) -> dict[Key, Factors]:
    generator = torch.Generator().manual_seed(rank)
    factors = {}
    for key in keys:
        weight = linear_of(model, key).weight
        out, inputs = weight.shape if key[1] != "embed" else weight.T.shape
        a = torch.randn(rank, inputs, generator=generator) / 8
        factors[key] = a, torch.randn(out, rank, generator=generator) / rank**0.5 / 2
    return factors


def all_keys(model: transformers.PreTrainedModel) -> list[Key]:
    layers = range(model.config.num_hidden_layers)
    return [*product(layers, HF_NAMES), (-1, "embed"), (-1, "head")]


@torch.no_grad()
def merge(model: transformers.PreTrainedModel, factors: dict[Key, Factors]) -> None:
    for key, (a, b) in factors.items():
        linear_of(model, key).weight += (b @ a).T if key[1] == "embed" else b @ a


def adapter_of(model: PackedLlama, factors: dict[Key, Factors]) -> DecoderAdapter:
    return DecoderAdapter(model.shape, model.spec.num_layers, factors)


FAMILIES = [
    (transformers.LlamaConfig, {"num_attention_heads": 6, "num_key_value_heads": 2}),
    (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    (transformers.Qwen3Config, {"head_dim": 32, "num_key_value_heads": 1, "intermediate_size": 72}),
]


@pytest.mark.parametrize("rank", [1, 4, 16, 40])
@pytest.mark.parametrize("isa", range(native.load().tl_best_isa() + 1))
@pytest.mark.parametrize(("config", "fields"), FAMILIES)
def test_as_if_merged_into_the_weights(
    config: type[transformers.PreTrainedConfig],
    fields: dict[str, int],
    isa: int,
    rank: int,
    checkpoint: Checkpoint,
    load_packed: Load,
    oracle: Callable[..., torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = checkpoint(config, **(CONFIG | {"tie_word_embeddings": False} | fields))
    model = load_packed("int8")
    monkeypatch.setattr(
        packed_module, "Decoder", lambda *args, **options: Decoder(*args, isa=isa, **options)
    )
    factors = random_factors(reference, all_keys(reference), rank)
    ids = tokens(60)
    plain = oracle(reference, ids)[-1]
    merge(reference, factors)
    expected = oracle(reference, ids)[-1]
    got = PackedPool(model).run({"a": ids}, adapters={"a": adapter_of(model, factors)})[0]
    assert torch.cosine_similarity(got, expected, dim=0) > 0.998
    assert torch.cosine_similarity(plain, expected, dim=0) < 0.9


@pytest.mark.parametrize("key", [(1, name) for name in HF_NAMES] + [(-1, "embed"), (-1, "head")])
def test_every_map_alone(
    key: Key, checkpoint: Checkpoint, load_packed: Load, oracle: Callable[..., torch.Tensor]
) -> None:
    """Borders of q, k and v lie within blocks of 16 here."""
    fields = {"head_dim": 12, "tie_word_embeddings": False}
    reference = checkpoint(transformers.LlamaConfig, **(CONFIG | fields))
    model = load_packed("int8")
    factors = {k: (3 * a, b) for k, (a, b) in random_factors(reference, [key], 8).items()}
    ids = tokens(30)
    base = PackedPool(model).run({"a": ids})[0]
    before = oracle(reference, ids)[-1]
    merge(reference, factors)
    change = oracle(reference, ids)[-1] - before
    got = PackedPool(model).run({"a": ids}, adapters={"a": adapter_of(model, factors)})[0] - base
    assert torch.cosine_similarity(got, change, dim=0) > 0.95


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_law_with_adapters(kind: str, checkpoint: Checkpoint, load_packed: Load) -> None:
    """Base and adapters of several ranks, alone, chunked, token by token and in a crowd."""
    reference = checkpoint(transformers.LlamaConfig, **CONFIG)
    model = load_packed(kind)
    adapters = [
        adapter_of(model, random_factors(reference, keys, rank))
        for keys, rank in (
            (all_keys(reference)[:-2], 1),
            ([(0, "q"), (1, "down")], 4),
            (all_keys(reference), 16),
            ([(0, "gate"), (0, "v"), (-1, "head")], 64),
        )
    ]
    owners = {"base": None, **{f"a{i}": adapter for i, adapter in enumerate(adapters)}}
    ids = {name: tokens(70 + 9 * i, i) for i, name in enumerate(owners)}
    pool = PackedPool(model)
    alone = {
        name: pool.run({f"{name} alone": ids[name]}, adapters={f"{name} alone": owner})[0]
        for name, owner in owners.items()
    }
    assert torch.equal(alone["base"], pool.run({"without": ids["base"]})[0])
    crowd = pool.run(ids, adapters=owners)
    for row, name in zip(crowd, owners, strict=True):
        assert torch.equal(row, alone[name]), name
    stepped = {f"{name} stepped": owner for name, owner in owners.items()}
    pool.run({name: ids[name.split()[0]][:50] for name in stepped}, adapters=stepped)
    for position in range(50, 70):
        last = pool.run({n: [ids[n.split()[0]][position]] for n in stepped}, adapters=stepped)
    assert torch.equal(last[0], alone["base"])
    rest = {name: ids[name.split()[0]][70:] for name in list(stepped)[1:]}
    for row, name in zip(pool.run(rest, adapters=stepped), rest, strict=True):
        assert torch.equal(row, alone[name.split()[0]]), name


@pytest.mark.parametrize("rank", [1, 3, 4, 8, 20])
def test_an_adapter_is_one_piece_of_memory_that_lives_as_long(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several MB: what pads a low rank may be more than what is padded."""
    pieces = []

    def noted(num_bytes: int) -> mmap.mmap:
        pieces.append(map_memory(num_bytes))
        return pieces[-1]

    monkeypatch.setattr(arena, "map_memory", noted)
    shape = DecoderShape(500, 5, 1, 100, 1001, 8000, 1e-5, torch.zeros(4, 100))
    sizes = {"q": (500, 500), "k": (100, 500), "gate": (1001, 500), "down": (500, 1001)}
    factors = {
        (layer, name): (torch.randn(rank, inputs), torch.randn(outputs, rank))
        for layer, (name, (outputs, inputs)) in product(range(30), sizes.items())
    }
    factors[-1, "embed"] = torch.randn(rank, 8000), torch.randn(500, rank)
    adapter = DecoderAdapter(shape, 30, factors)
    assert len(pieces) == 1
    assert adapter.num_bytes <= len(pieces[0])
    a = factors[0, "q"][0].to(torch.bfloat16)
    first = ctypes.cast(adapter.struct.linears[0].parts[0].a, ctypes.POINTER(ctypes.c_uint16))
    assert first[0] == a.view(torch.uint16)[0, 0].item()
