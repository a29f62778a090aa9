"""What generation_config.json makes of the sampling that chat clients use."""

import json
import logging
from pathlib import Path

import pytest

from tokenloom.model_files.errors import ModelError
from tokenloom.tokenizer_proc.recommended import recommended_sampling
from tokenloom.wire.sampling import SamplingParams


@pytest.mark.parametrize(
    ("config", "recommended"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1},
         SamplingParams(temperature=0.6, top_p=0.95, top_k=20, min_p=0.1)),
        ({"temperature": 1, "repetition_penalty": 1.1, "eos_token_id": [1, 2]},
         SamplingParams(temperature=1.0, repetition_penalty=1.1)),
        ({"do_sample": False, "temperature": 0.7}, SamplingParams(temperature=0.0)),
        ({"eos_token_id": 2, "temperature": None}, None),
    ],
)  # fmt: skip
def test_it_is_taken(
    tmp_path: Path, config: dict[str, object], recommended: SamplingParams | None
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    assert recommended_sampling(str(tmp_path)) == recommended


@pytest.mark.parametrize("config", [{"temperature": -1}, {"top_k": "many"}, {"top_p": 0.0}])
def test_nonsense_is_ignored_with_a_word(
    tmp_path: Path, config: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING):
        assert recommended_sampling(str(tmp_path)) is None
    assert next(iter(config)) in caplog.text


def test_files_without_one_recommend_nothing(tmp_path: Path) -> None:
    assert recommended_sampling(str(tmp_path)) is None
    assert recommended_sampling(str(tmp_path / "model.gguf")) is None


def test_broken_json_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json cannot be read"):
        recommended_sampling(str(tmp_path))
