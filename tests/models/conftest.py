"""Helpers of the model tests: a KV pool that builds ForwardBatches, and tiny checkpoints."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tokenloom.scheduler_proc.models.config import ModelSpec
from tokenloom.scheduler_proc.models.forward_batch import ForwardBatch
from tokenloom.scheduler_proc.models.llama import LlamaForCausalLM
from tokenloom.scheduler_proc.models.loader import load_model, load_packed_model
from tokenloom.scheduler_proc.models.packed import PackedLlama
from tokenloom.scheduler_proc.worker_batch import ForwardMode

VOCAB = 97


class KVPool:
    """Slots in a shuffled order, poisoned with NaN until written: a stray read is seen."""

    def __init__(self, spec: ModelSpec, num_slots: int = 256) -> None:
        shape = (num_slots, spec.num_kv_heads, spec.head_dim)
        self.k = [torch.full(shape, torch.nan) for _ in range(spec.num_layers)]
        self.v = [torch.full(shape, torch.nan) for _ in range(spec.num_layers)]
        order = torch.randperm(num_slots - 16, generator=torch.Generator().manual_seed(1))
        self._free = (order + 16).tolist()
        self._slots: dict[str, list[int]] = {}

    def batch(
        self, pieces: dict[str, Sequence[int]], logits: Sequence[int] | None = None
    ) -> ForwardBatch:
        """The next tokens of each named request; logits of all tokens unless told."""
        prefix_lens = [len(self._slots.get(name, [])) for name in pieces]
        extend_lens = [len(ids) for ids in pieces.values()]
        positions, new_slots, tables = [], [], []
        for name, ids in pieces.items():
            table = self._slots.setdefault(name, [])
            positions += range(len(table), len(table) + len(ids))
            taken = [self._free.pop() for _ in ids]
            new_slots += taken
            table += taken
            tables.append(torch.tensor(table))
        flat = [token for ids in pieces.values() for token in ids]
        decode = all(length == 1 for length in extend_lens)
        return ForwardBatch(
            mode=ForwardMode.DECODE if decode else ForwardMode.EXTEND,
            input_ids=torch.tensor(flat),
            positions=torch.tensor(positions),
            out_cache_loc=torch.tensor(new_slots),
            rows=list(range(len(pieces))),
            page_table=_page_table(tables),
            page_size=1,
            extend_lens=extend_lens,
            prefix_lens=prefix_lens,
            request_slots=tables,
            logit_indices=torch.tensor(
                list(range(len(flat)) if logits is None else logits), dtype=torch.int64
            ),
            k_cache=self.k,
            v_cache=self.v,
        )


def _page_table(tables: list[torch.Tensor]) -> torch.Tensor:
    """Pages of one slot each: [requests, longest] int32."""
    return torch.nn.utils.rnn.pad_sequence(tables, batch_first=True).int()


@pytest.fixture
def kv_pool() -> type[KVPool]:
    return KVPool


@pytest.fixture
def prompt() -> list[int]:
    generator = torch.Generator().manual_seed(3)
    return torch.randint(0, VOCAB, (21,), generator=generator).tolist()


Checkpoint = Callable[..., "transformers.PreTrainedModel"]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """Saves a random model of a transformers config class to tmp_path and returns it."""

    def save(
        config_class: type[transformers.PreTrainedConfig], **fields: object
    ) -> transformers.PreTrainedModel:
        small: dict[str, Any] = {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 112,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            # Large enough that attention and RoPE move the logits well above the tolerance.
            "initializer_range": 0.2,
            "attn_implementation": "eager",
        }
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config_class(**(small | fields)))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias") or "norm" in name:
                    parameter.add_(torch.randn(parameter.shape) * 0.2)
        model.eval().save_pretrained(tmp_path)
        return model

    return save


@pytest.fixture
def edit_config(tmp_path: Path) -> Callable[..., None]:
    """Rewrites keys of config.json in tmp_path; a value of `...` removes the key."""

    def edit(**fields: object) -> None:
        path = tmp_path / "config.json"
        config = json.loads(path.read_text()) | fields
        kept = {key: value for key, value in config.items() if value is not ...}
        path.write_text(json.dumps(kept))

    return edit


Load = Callable[[Path], LlamaForCausalLM]


@pytest.fixture
def load() -> Load:
    def load_float32(path: Path) -> LlamaForCausalLM:
        return load_model(
            str(path), dtype=torch.float32, device="cpu", load_format="auto", context_length=None
        )

    return load_float32


def oracle_logits(model: transformers.PreTrainedModel, ids: Sequence[int]) -> torch.Tensor:
    """[len(ids), vocab] of the whole prompt at once."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([list(ids)])).logits[0]
    return logits


@pytest.fixture
def oracle() -> Callable[[transformers.PreTrainedModel, Sequence[int]], torch.Tensor]:
    return oracle_logits


@pytest.fixture
def agrees(load: Load, prompt: list[int]) -> Callable[..., LlamaForCausalLM]:
    """Loads a path and holds its logits against those of a transformers model."""

    def check(reference: transformers.PreTrainedModel, path: Path) -> LlamaForCausalLM:
        model = load(path)
        logits = model.forward(KVPool(model.spec).batch({"a": prompt}))
        expected = oracle_logits(reference, prompt)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
        return model

    return check


@pytest.fixture
def load_packed(tmp_path: Path) -> Callable[..., PackedLlama]:
    def load(kind: str = "int8", threads: int = 2) -> PackedLlama:
        return load_packed_model(
            str(tmp_path),
            kind,  # type: ignore[arg-type]
            load_format="auto",
            context_length=None,
            threads=threads,
        )

    return load
