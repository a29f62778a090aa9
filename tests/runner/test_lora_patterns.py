"""Patterns of adapter configs: matched as peft does it, at a bounded cost whatever they are."""

import json
import re
import resource
import time
from typing import Any

import pytest
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from peft.utils.other import get_pattern_key

from tokenloom.model_files.errors import AdapterError
from tokenloom.scheduler_proc.runner import lora_patterns
from tokenloom.scheduler_proc.runner.lora_config import TargetedModules, parse_peft_config
from tokenloom.scheduler_proc.runner.lora_patterns import MAX_PATTERN_CHARS, MAX_PATTERNS

NAMES = [
    f"model.layers.{layer}.{name}"
    for layer in (0, 1, 11)
    for name in (
        *(f"self_attn.{part}_proj" for part in "qkvo"),
        *(f"mlp.{part}_proj" for part in ("gate", "up", "down")),
    )
] + ["model.embed_tokens", "lm_head"]


def modules(**fields: object) -> TargetedModules:
    data = json.dumps({"peft_type": "LORA", "target_modules": ["q_proj"]} | fields).encode()
    return TargetedModules(parse_peft_config(data), NAMES)


MATCHES: list[dict[str, Any]] = [
    {"target_modules": ["q_proj", "proj", "mlp.up_proj", "1.mlp.down_proj"]},
    {"target_modules": ["embed_tokens", "lm_head"], "layers_to_transform": 0},
    {"target_modules": ["model.embed_tokens", "q_proj"], "layers_to_transform": [1, 11]},
    {"target_modules": ["q_proj"], "layers_to_transform": []},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": []},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "lay.rs"},
    {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["h", "model"]},
    {"target_modules": r"q_proj|.*1\.mlp.*"},
    {"target_modules": r".*[qv]_proj", "exclude_modules": r".*1.*"},
    {"target_modules": r".*", "exclude_modules": ["0.mlp.up_proj", "k_proj", "proj", "lm_head"]},
]


@pytest.mark.parametrize("fields", MATCHES, ids=str)
def test_targets_are_those_of_peft(fields: dict[str, Any]) -> None:
    config = modules(**fields)
    reference = LoraConfig(**fields)
    for name in NAMES:
        assert config.targets(name) == bool(check_target_module_exists(reference, name)), name


def test_patterns_are_looked_up_as_in_peft() -> None:
    patterns = {"x_proj": 1, "1.self_attn.q_proj": 2, "q_proj|k_proj": 3, r"\d.mlp": 4, ".*": 5}
    fields = {"target_modules": "all-linear", "rank_pattern": patterns, "alpha_pattern": patterns}
    config = modules(r=7, **fields)
    for name in NAMES:
        assert config.rank(name) == patterns.get(get_pattern_key(patterns, name), 7), name
        assert config.scaling(name) == 1.0


PATTERNS = ["q_proj", "proj", "lm_head", "", "q.proj", r"0\.mlp\.up_proj", "q_proj|k_proj", "a|.*"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_means_what_python_makes_of_it(pattern: str) -> None:
    found = lora_patterns.match_all([("whole", pattern), ("end", pattern)], NAMES)
    whole = {name for name in NAMES if re.fullmatch(pattern, name)}
    end = {name for name in NAMES if re.match(rf"(.*\.)?({pattern})$", name)}
    assert (set(found["whole", pattern]), set(found["end", pattern])) == (whole, end)


def test_plain_names_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_patterns.subprocess, "run", None)
    asked = modules(target_modules=["q_proj"], rank_pattern={"q_proj": 3}, layers_to_transform=[1])
    assert [name for name in NAMES if asked.targets(name)] == ["model.layers.1.self_attn.q_proj"]
    assert asked.rank("model.layers.1.self_attn.q_proj") == 3


def deep(count: int) -> str:
    return "(" * count + "a" + ")" * count


COSTLY = {
    "endless": {"target_modules": r"(.|..)*\d"},
    "endless_by_rank": {"rank_pattern": {r"(.|..)*\d": 2}},
    "many_that_are_slow": {"rank_pattern": {rf"(?:.*.*.*.*.*)x{i}": 8 for i in range(900)}},
    "alternatives": {"target_modules": "|".join(f"(?:.*)*x{i}" for i in range(2500))},
    "nested": {"target_modules": deep(2500)},
    "nested_excluded": {"exclude_modules": deep(15_000)},
    "nested_layer": {"layers_to_transform": 1, "layers_pattern": deep(2500)},
    "long": {"exclude_modules": "a" * (MAX_PATTERN_CHARS + 1)},
    "many": {"alpha_pattern": {f"x{i}": 8 for i in range(MAX_PATTERNS + 1)}},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", COSTLY)
def test_a_config_costs_bounded_time_and_memory(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time that counts is this process's own, whose lock others wait for."""
    monkeypatch.setattr(lora_patterns, "CPU_SECONDS", 1)
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    own = time.process_time()
    with pytest.raises(AdapterError, match=r"pattern|too deep") as refused:
        modules(**COSTLY[case])
    assert len(str(refused.value)) < 400
    assert time.process_time() - own < 0.5
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime < 2
    assert after.ru_maxrss << 10 <= max(children.ru_maxrss << 10, lora_patterns.MEMORY_BYTES)


def test_repeated_repetitions_match_nothing_at_little_cost() -> None:
    """The package `regex` takes 4 GB to compile this."""
    asked = modules(target_modules="((((a{99}){99}){99}){99})*q")
    assert not any(map(asked.targets, NAMES))


def test_lists_of_names_cost_little() -> None:
    many = [f"x{i}" for i in range(20_000)]
    own = time.process_time()
    asked = modules(target_modules=[*many, "q_proj"], exclude_modules=many)
    assert sum(map(asked.targets, NAMES)) == 3
    assert time.process_time() - own < 0.5


@pytest.mark.parametrize("key", ["surprise", "bias", "peft_type", "task_type"])
def test_what_is_refused_is_not_repeated_at_length(key: str) -> None:
    for value in ("x" * 100_000, ["x" * 1000] * 200, json.loads("[" * 700 + "]" * 700)):
        with pytest.raises(AdapterError) as refused:
            modules(**{key: value})
        assert len(str(refused.value)) < 400
