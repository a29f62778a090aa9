"""The int8 and int4 decoders: close to float32, and bitwise the same however a token is computed.

The law of the packed modes: an answer does not depend on batch-mates, chunks, cached pages, page
size or threads; compared bit by bit.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers

from tokenloom.kernels.cpu import native
from tokenloom.kernels.decoder import Decoder, cache_width
from tokenloom.kernels.decoder_adapter import DecoderAdapter
from tokenloom.model_files.resolve import resolve_model
from tokenloom.scheduler_proc.models import packed as packed_module
from tokenloom.scheduler_proc.models.forward_batch import ForwardBatch
from tokenloom.scheduler_proc.models.llama import LlamaForCausalLM
from tokenloom.scheduler_proc.models.loader import load_packed_model
from tokenloom.scheduler_proc.models.packed import PackedLlama
from tokenloom.scheduler_proc.worker_batch import ForwardMode

KINDS = ["int8", "int4"]
KV_DTYPES = [torch.bfloat16, torch.int8]
PAGES = 4096 // 16


class PackedPool:
    """Pages in a shuffled order; requests by name, some of which start on another's pages."""

    def __init__(
        self,
        model: PackedLlama,
        page_size: int = 16,
        num_tokens: int = 4096,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        spec, self.page_size = model.spec, page_size
        shape = (num_tokens, spec.num_kv_heads, cache_width(spec.head_dim, dtype))
        self.k = [torch.zeros(shape, dtype=dtype) for _ in range(spec.num_layers)]
        self.v = [torch.zeros(shape, dtype=dtype) for _ in range(spec.num_layers)]
        generator = torch.Generator().manual_seed(5)
        order = torch.randperm(num_tokens // page_size - 1, generator=generator)
        self.free = (order + 1).tolist()
        self.table = torch.zeros(40, num_tokens // page_size, dtype=torch.int32)
        self.rows: dict[str, int] = {}
        self.lengths: dict[str, int] = {}
        self.model = model

    def share(self, name: str, other: str, tokens: int) -> None:
        """`name` starts with the first `tokens` (whole pages) of `other`."""
        self.rows[name] = len(self.rows)
        pages = tokens // self.page_size
        self.table[self.rows[name], :pages] = self.table[self.rows[other], :pages]
        self.lengths[name] = tokens

    def run(
        self,
        pieces: dict[str, Sequence[int]],
        adapters: Mapping[str, DecoderAdapter | None] | None = None,
    ) -> torch.Tensor:
        """Logits of the last token of each piece."""
        prefix = [self.lengths.get(name, 0) for name in pieces]
        counts = [len(ids) for ids in pieces.values()]
        for name, ids in pieces.items():
            row = self.rows.setdefault(name, len(self.rows))
            before = self.lengths.get(name, 0)
            self.lengths[name] = before + len(ids)
            for index in range(
                -(-before // self.page_size), -(-self.lengths[name] // self.page_size)
            ):
                self.table[row, index] = self.free.pop()
        ends = torch.tensor(counts).cumsum(0)
        return self.model.forward(
            ForwardBatch(
                mode=ForwardMode.MIXED,
                input_ids=torch.tensor([i for ids in pieces.values() for i in ids]),
                positions=torch.empty(0),
                out_cache_loc=torch.empty(0),
                rows=[self.rows[name] for name in pieces],
                page_table=self.table,
                page_size=self.page_size,
                extend_lens=counts,
                prefix_lens=prefix,
                request_slots=[],
                logit_indices=ends - 1,
                k_cache=self.k,
                v_cache=self.v,
                adapters=[adapters[name] for name in pieces] if adapters else [],
            )
        )


def tokens(count: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 97, (count,), generator=generator).tolist()


Checkpoint = Callable[..., transformers.PreTrainedModel]
FAMILIES = [
    (transformers.LlamaConfig, {"num_attention_heads": 6, "num_key_value_heads": 2}),
    (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    (transformers.Qwen2Config, {"num_key_value_heads": 4}),
    (transformers.Qwen3Config, {"head_dim": 32, "num_key_value_heads": 1}),
    (transformers.MistralConfig, {"head_dim": 80, "sliding_window": None}),
]
LONG = {"hidden_size": 96, "max_position_embeddings": 2048, "initializer_range": 0.08}


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("config", "fields"), FAMILIES)
def test_close_to_float32(
    config: type[transformers.PreTrainedConfig],
    fields: dict[str, int],
    kind: str,
    dtype: torch.dtype,
    checkpoint: Checkpoint,
    load_packed: Callable[..., PackedLlama],
    oracle: Callable[..., torch.Tensor],
) -> None:
    """Within what the weights' rounding costs: the float32 model holds the unrounded ones."""
    reference = checkpoint(config, **(LONG | fields))
    pool = PackedPool(load_packed(kind), dtype=dtype)
    ids = tokens(300)
    expected = oracle(reference, ids)[-1]
    got = pool.run({"a": ids})[0]
    similarity = torch.cosine_similarity(got, expected, dim=0)
    assert similarity > (0.999 if kind == "int8" else 0.95)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("page_size", "dtype"),
    [
        *((page_size, torch.bfloat16) for page_size in (1, 4, 16, 32, 64)),
        *((page_size, torch.int8) for page_size in (16, 64)),
    ],
)
def test_the_law(
    kind: str,
    page_size: int,
    dtype: torch.dtype,
    checkpoint: Checkpoint,
    load_packed: Callable[..., PackedLlama],
) -> None:
    """Whole, in chunks, token by token, from shared pages, in a crowd: the same bits."""
    checkpoint(transformers.LlamaConfig, **(LONG | {"num_attention_heads": 6}))
    pool = PackedPool(load_packed(kind), page_size, dtype=dtype)
    ids = tokens(600)
    whole = pool.run({"whole": ids})[0]
    for start in range(0, 600, 100):
        chunked = pool.run({"chunked": ids[start : start + 100]})[0]
    assert torch.equal(chunked, whole)
    pool.run({"stepped": ids[:580]})
    for token in ids[580:]:
        stepped = pool.run({"stepped": [token]})[0]
    assert torch.equal(stepped, whole)
    for other in ("p", "q", "r"):
        pool.share(other, "whole", 576)
    crowd = pool.run(
        {"p": ids[576:], "x": tokens(40, 2), "q": ids[576:], "y": tokens(3, 3), "r": ids[576:]}
    )
    assert torch.equal(crowd[[0, 2, 4]], whole.expand(3, -1))
    # Requests that part within a piece of 256 keys whose first pages they share.
    for other in ("apart", "alone"):
        pool.share(other, "whole", 512 + 64)
    parted = pool.run({"p": [8], "apart": tokens(9, 7), "q": [8]})
    assert torch.equal(parted[1], pool.run({"alone": tokens(9, 7)})[0])
    pool.run({"whole": [8], "chunked": [8], "r": [8]})
    again = pool.run({"whole": [9], "p": [9], "y": [4], "q": [9], "chunked": [9], "r": [9]})
    assert torch.equal(again[[1, 3, 4, 5]], again[0].expand(4, -1))


@pytest.mark.parametrize("kind", KINDS)
def test_threads_and_page_size_change_no_bit(
    kind: str, checkpoint: Checkpoint, load_packed: Callable[..., PackedLlama]
) -> None:
    checkpoint(transformers.LlamaConfig, **LONG)
    ids = tokens(700)
    results = []
    for threads, page_size in ((1, 16), (2, 16), (3, 4), (2, 64)):
        pool = PackedPool(load_packed(kind, threads), page_size)
        pool.run({"a": ids, "b": ids[:70]})
        results.append(pool.run({"b": [5], "a": [5]}))
    for other in results[1:]:
        assert torch.equal(other, results[0])


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system has no affinity")
def test_pinned_threads_keep_to_their_cores_and_change_no_bit(
    checkpoint: Checkpoint, load_packed: Callable[..., PackedLlama]
) -> None:
    checkpoint(transformers.LlamaConfig, **LONG)
    expected = PackedPool(load_packed("int8", 2)).run({"a": tokens(60)})
    model, cpu = load_packed("int8", 2), min(os.sched_getaffinity(0))
    model.pin([cpu, cpu])

    def run() -> tuple[torch.Tensor, set[int]]:
        return PackedPool(model).run({"a": tokens(60)}), os.sched_getaffinity(0)

    with ThreadPoolExecutor(1) as thread:  # not this one: it is to stay free
        got, allowed = thread.submit(run).result()
    assert torch.equal(got, expected)
    assert allowed == {cpu}
    model.reset()
    model.pin([0])
    with pytest.raises(ValueError, match="1 cores for 2 threads"):
        PackedPool(model).run({"a": [1]})


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("isa", range(native.load().tl_best_isa() + 1))
def test_every_instruction_set_agrees(
    isa: int,
    dtype: torch.dtype,
    checkpoint: Checkpoint,
    load_packed: Callable[..., PackedLlama],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint(transformers.LlamaConfig, **LONG)
    ids = tokens(290)
    expected = PackedPool(load_packed(), dtype=dtype).run({"a": ids})

    def forced(*args: object, **options: object) -> Decoder:
        return Decoder(*args, isa=isa, **options)  # type: ignore[arg-type, misc]

    monkeypatch.setattr(packed_module, "Decoder", forced)
    got = PackedPool(load_packed(), dtype=dtype).run({"a": ids})
    torch.testing.assert_close(got, expected, rtol=0, atol=0.05 * float(expected.abs().max()))
    assert torch.cosine_similarity(got[0], expected[0], dim=0) > 0.9995


@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_rubbish_beyond_a_request_is_never_read(
    dtype: torch.dtype, checkpoint: Checkpoint, load_packed: Callable[..., PackedLlama]
) -> None:
    """NaN in all slots that the request did not write, behind its end in its last page too."""
    checkpoint(transformers.LlamaConfig, **(LONG | {"hidden_size": 64}))  # no padding in a head
    model = load_packed()
    clean, dirty = PackedPool(model, dtype=dtype), PackedPool(model, dtype=dtype)
    model.reset()
    expected = clean.run({"a": tokens(37)})
    model.reset()
    for cache in dirty.k + dirty.v:
        cache.fill_(torch.nan if dtype.is_floating_point else -1)  # bytes of ones: NaN as a scale
    assert torch.equal(dirty.run({"a": tokens(37)}), expected)


def test_an_odd_page_size_is_refused(
    checkpoint: Checkpoint, load_packed: Callable[..., PackedLlama]
) -> None:
    checkpoint(transformers.LlamaConfig)
    with pytest.raises(ValueError, match=r"--page-size 8 .* --kv-cache-dtype int8"):
        PackedPool(load_packed(), 8, dtype=torch.int8).run({"a": [1]})
    for page_size in (12, 48):  # 48: a piece would end within a page that others may not share
        with pytest.raises(ValueError, match=f"--page-size {page_size}"):
            PackedPool(load_packed(), page_size).run({"a": [1]})


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_embedded_model_answers(kind: str) -> None:
    """Its 4-bit blocks are held as they are: int4 stays closest to the file's own float32."""
    path = resolve_model(None, None)
    model = load_packed_model(
        path,
        kind,
        load_format="auto",
        context_length=None,
        threads=2,  # type: ignore[arg-type]
    )
    pool = PackedPool(model)
    prompt = [504, 3575, 282, 4649, 314]  # "The capital of France is"
    logits = pool.run({"a": prompt})
    assert int(logits[0].argmax()) == 7042  # " Paris"


def test_plain_weights_are_given_up(
    checkpoint: Checkpoint, load_packed: Callable[..., PackedLlama]
) -> None:
    checkpoint(transformers.LlamaConfig)
    before = LlamaForCausalLM
    model = load_packed()
    held = [value for value in vars(model).values() if isinstance(value, before)]
    assert held == []
