"""Perplexity and greedy agreement: the driver against transformers, the arithmetic, the text."""

import math
import re
from importlib.resources import files
from pathlib import Path

import msgspec
import pytest
import torch
import transformers

from tokenloom.bench import quality
from tokenloom.bench.quality import (
    KVSpace,
    Material,
    Quality,
    Raw,
    compare,
    greedy,
    load,
    main,
    measure,
    read_material,
    show,
    window_loss,
)
from tokenloom.model_files.errors import ModelError
from tokenloom.model_files.resolve import resolve_model

VOCAB = 97
CUT = 90  # what the tokenizer can spell


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, transformers.PreTrainedModel]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=112,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    path = tmp_path_factory.mktemp("model")
    model.save_pretrained(path)
    return str(path), model


def ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, CUT, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def logits(model: transformers.PreTrainedModel, tokens: list[int]) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.tensor([tokens])).logits[0, :, :CUT]
    return found


def test_losses_are_those_of_transformers(
    oracle: tuple[str, transformers.PreTrainedModel],
) -> None:
    path, reference = oracle
    space = KVSpace(load(path, "float32", 1))
    for seed, length in ((1, 50), (2, 33), (3, 2)):  # no window sees the one before it
        window = ids(length, seed)
        expected = torch.nn.functional.cross_entropy(
            logits(reference, window)[:-1], torch.tensor(window[1:])
        )
        assert window_loss(space, window, CUT) == pytest.approx(float(expected), abs=1e-5)


def test_greedy_answers_are_those_of_transformers(
    oracle: tuple[str, transformers.PreTrainedModel],
) -> None:
    path, reference = oracle
    prompts = [ids(19, seed) for seed in range(4)]
    answers = greedy(KVSpace(load(path, "float32", 1)), prompts, 15, CUT)
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = list(prompt)
        for _ in range(15):
            expected.append(int(logits(reference, expected)[-1].argmax()))
        assert answer == expected[19:]


@pytest.mark.parametrize("mode", ["bfloat16", "int8", "int4"])
def test_every_mode_runs_and_stays_near(
    mode: str, oracle: tuple[str, transformers.PreTrainedModel]
) -> None:
    path, _ = oracle
    windows = [ids(512, seed) for seed in range(2)]
    material = Material(windows=windows, prompts=[ids(32, seed) for seed in range(30)], vocab=CUT)
    done: list[int] = []
    raw = measure(load(path, mode, 1), mode, material, done.append)
    assert sum(done) == 32
    assert [len(answer) for answer in raw.answers] == [32] * 30
    expected = measure(load(path, "float32", 1), "float32", material, done.append)
    assert raw.losses == pytest.approx(expected.losses, rel=0.05)
    assert compare(mode, raw, expected).common_prefix > 1  # 0.01 by chance


def test_a_short_context_is_refused(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=1, max_position_embeddings=256,
    )  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="512"):
        measure(load(str(tmp_path), "float32", 1), "float32", Material([], [], VOCAB), int)


def test_the_arithmetic() -> None:
    reference = Raw([2.0, 4.0], [[1, 2, 3], [4, 5, 6], [7, 8, 9], [1, 1, 1]])
    raw = Raw([2.1, 4.1], [[1, 2, 3], [4, 5, 0], [0, 8, 9], [1, 1, 1]])
    got = compare("int8", raw, reference)
    assert got.perplexity == pytest.approx(math.exp(3.1))
    assert got.change == pytest.approx(math.exp(0.1) - 1)
    assert got.change_error == pytest.approx(0, abs=1e-12)
    assert (got.identical, got.common_prefix) == (0.5, (3 + 2 + 0 + 3) / 4)
    noisy = compare("int8", Raw([2.0, 4.2], reference.answers), reference)
    assert noisy.change_error == pytest.approx(math.exp(0.1) * 0.1)
    assert math.isnan(compare("int8", Raw([2.0], [[1]]), Raw([1.0], [[1]])).change_error)


def test_the_table_says_nothing_of_the_reference_against_itself() -> None:
    first, second = show(
        [Quality("float32", 9.0, 0.0, 0.0, 1.0, 32.0), Quality("int8", 9.1, 0.01, 0.002, 0.5, 20.0)]
    ).splitlines()[1:]
    assert "±" not in first
    assert "+1.00% ± 0.20%" in second


def test_the_text_is_what_its_note_says() -> None:
    folder = files(quality.__package__).joinpath("data")
    text = folder.joinpath("quality.txt").read_text("ascii")
    assert not re.search(r"[^\S\n ]|  | \n|\n |\n{3}", text)
    path = resolve_model(None, None)
    material = read_material(path, None, 100)
    characters, tokens = len(text), len(quality.load_tokenizer(path).encode(text).ids)
    assert tokens >= 20_000
    note = folder.joinpath("README.md").read_text("utf-8")
    assert f"{characters:,} characters".replace(",", " ") in note
    assert f"{tokens:,} tokens".replace(",", " ") in note
    assert len(material.windows) == tokens // 512
    assert {len(window) for window in material.windows} == {512}
    assert {len(prompt) for prompt in material.prompts} == {32}
    assert len({tuple(prompt) for prompt in material.prompts}) == 100


def test_fewer_windows_are_spread_over_the_text() -> None:
    path = resolve_model(None, None)
    every = read_material(path, None, 1).windows
    some = read_material(path, 4, 1).windows
    assert [every.index(window) for window in some] == [0, 11, 23, 34]


@pytest.mark.parametrize("flags", [["--modes", "int3"], ["--windows", "0"], ["--prompts", "x"]])
def test_wrong_flags_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(flags)


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "./nowhere.gguf"]) == 1
    assert "nowhere.gguf" in capsys.readouterr().err


@pytest.mark.slow
def test_the_embedded_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "quality.json"
    flags = ["--modes", "int4", "--windows", "1", "--prompts", "2", "--json", str(file)]
    assert main(flags) == 0
    assert "1 windows of 512 tokens, 2 prompts" in capsys.readouterr().out
    reference, int4 = msgspec.json.decode(file.read_bytes())["results"]
    assert (reference["mode"], int4["mode"]) == ("float32", "int4")
    assert 5 < reference["perplexity"] < 40
    assert abs(int4["change"]) < 0.1
