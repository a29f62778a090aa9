"""read_end_tokens: what ends an answer, from ids, names and the chat template of either format."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

from tokenloom.model_files.end_tokens import EndTokens, read_end_tokens
from tokenloom.model_files.errors import ModelError

NORMAL, CONTROL, USER = 1, 3, 4
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(directory: Path, **files: Any) -> str:  # noqa: ANN401  (any JSON value)
    for name, value in files.items():
        (directory / f"{name}.json").write_text(json.dumps(value))
    return str(directory)


def tokenizer_json(added: list[dict[str, Any]]) -> dict[str, Any]:
    return {"added_tokens": added, "model": {"vocab": {}}}


def texts(ends: EndTokens) -> list[str]:
    return [token.text for token in ends.tokens]


def gguf_file(
    path: Path,
    tokens: dict[str, int],
    template: str | None = None,
    merges: tuple[str, ...] = (),
    **ids: int,
) -> str:
    """A vocabulary of some letters and `tokens` with their types; `ids` are `*_token_id` keys."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*"abcdim", *tokens])
    writer.add_token_types([NORMAL] * 6 + list(tokens.values()))
    writer.add_token_merges(list(merges))
    for key, value in ids.items():
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", value)
    if template is not None:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return str(path)


def test_the_turn_ends_where_the_file_names_the_end_of_text_alone(tmp_path: Path) -> None:
    tokens = {"<|endoftext|>": CONTROL, "<|im_start|>": CONTROL, "<|im_end|>": CONTROL}
    ends = read_end_tokens(gguf_file(tmp_path / "a.gguf", tokens, eos=6))
    assert texts(ends) == ["<|endoftext|>", "<|im_end|>"]
    assert ends.ids == (6, 8)


@pytest.mark.parametrize(
    "name",
    ["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|endoftext|>", "<|end|>", "<|im_end|>"],
)
def test_a_name_is_enough_where_no_id_is_given(name: str, tmp_path: Path) -> None:
    tokens = {"<|start|>": CONTROL, name: CONTROL}
    assert texts(read_end_tokens(gguf_file(tmp_path / "a.gguf", tokens))) == [name]
    path = write(tmp_path, tokenizer=tokenizer_json([{"id": 9, "content": name}]))
    assert read_end_tokens(path).ids == (9,)


def test_an_end_that_the_file_calls_text_is_an_end(tmp_path: Path) -> None:
    ends = read_end_tokens(gguf_file(tmp_path / "a.gguf", {"<|eot_id|>": USER}))
    assert texts(ends) == ["<|eot_id|>"]
    assert ends.mistyped == ("<|eot_id|>",)


def test_an_end_of_messages_of_which_an_answer_has_several_is_none(tmp_path: Path) -> None:
    tokens = {"<|end|>": CONTROL, "<|return|>": CONTROL, "<|call|>": CONTROL}
    path = gguf_file(tmp_path / "a.gguf", tokens)
    assert texts(read_end_tokens(path)) == ["<|return|>", "<|call|>"]


@pytest.mark.parametrize(
    ("behind", "expected"),
    [
        ("<stop>", ["<stop>"]),
        ("\n<stop>\n", ["<stop>"]),
        ("{{ eos_token }}", ["</s>"]),
        ("<stop><|x|>", ["<stop>"]),
        (" and that was all<stop>", []),
        ("", []),
        ("{{ raise_exception('no') }}", []),
    ],
)
def test_the_template_says_what_is_behind_an_answer(
    behind: str, expected: list[str], tmp_path: Path
) -> None:
    tokens = {"<stop>": CONTROL, "</s>": CONTROL, "<|x|>": CONTROL}
    template = "{% for m in messages %}<|x|>{{ m.content }}" + behind + "{% endfor %}"
    added = [{"id": i, "content": text, "special": True} for i, text in enumerate(tokens)]
    path = write(
        tmp_path,
        tokenizer=tokenizer_json(added),
        special_tokens_map={"bos_token": "<|x|>"},
        tokenizer_config={"chat_template": template},
    )
    if "eos_token" in behind:
        write(tmp_path, special_tokens_map={"eos_token": "</s>"})
    assert texts(read_end_tokens(path)) == expected


def test_the_template_of_a_gguf_file_counts_too(tmp_path: Path) -> None:
    template = CHATML.replace("<|im_end|>", "<|fin|>")
    tokens = {"<|im_start|>": CONTROL, "<|fin|>": CONTROL}
    ends = read_end_tokens(gguf_file(tmp_path / "a.gguf", tokens, template))
    assert [str(token) for token in ends.tokens] == ["<|fin|> (7: chat template)"]


def test_all_reasons_are_told(tmp_path: Path) -> None:
    tokens = {"<|im_start|>": CONTROL, "<|im_end|>": CONTROL}
    ends = read_end_tokens(gguf_file(tmp_path / "a.gguf", tokens, CHATML, eos=7))
    assert [str(token) for token in ends.tokens] == [
        "<|im_end|> (7: eos_token_id, name, chat template)"
    ]


def test_an_id_beyond_the_vocabulary_is_refused(tmp_path: Path) -> None:
    path = gguf_file(tmp_path / "a.gguf", {}, eos=6)
    with pytest.raises(ModelError, match=r"a\.gguf: tokenizer\.ggml\.eos_token_id is 6.* 6 tokens"):
        read_end_tokens(path)


def test_eos_is_the_union_over_the_files(tmp_path: Path) -> None:
    path = write(tmp_path, config={"eos_token_id": 7})
    assert read_end_tokens(path).ids == (7,)
    write(tmp_path, generation_config={"eos_token_id": [9, 7]})
    assert read_end_tokens(path).ids == (7, 9)
    write(
        tmp_path,
        tokenizer_config={"eos_token": "<end>"},
        tokenizer={"added_tokens": [{"id": 3, "content": "<end>"}], "model": {"vocab": {}}},
    )
    assert read_end_tokens(path).ids == (3, 7, 9)


def test_no_eos_anywhere(tmp_path: Path) -> None:
    assert read_end_tokens(write(tmp_path, config={"eos_token_id": None})).ids == ()


@pytest.mark.parametrize(
    ("tokenizer_config", "tokenizer", "expected"),
    [
        ({"eos_token": {"content": "</s>"}}, {"model": {"vocab": {"</s>": 2}}}, (2,)),
        ({"eos_token": "</s>"}, {"model": {"vocab": [["a", 0], ["</s>", -1]]}}, (1,)),
        ({"eos_token": "</s>"}, {"model": {"vocab": {"a": 0}}}, ()),
        ({"eos_token": None}, {"model": {"vocab": {"a": 0}}}, ()),
        (
            {"eos_token": "</s>", "added_tokens_decoder": {"4": {"content": "</s>"}}},
            {"model": {"vocab": {"</s>": 2}}},
            (4,),
        ),
    ],
)
def test_eos_as_a_string(
    tokenizer_config: dict[str, Any],
    tokenizer: dict[str, Any],
    expected: tuple[int, ...],
    tmp_path: Path,
) -> None:
    path = write(tmp_path, config={}, tokenizer_config=tokenizer_config, tokenizer=tokenizer)
    assert read_end_tokens(path).ids == expected


@pytest.mark.parametrize("value", ["2", -1, [1, "x"], True, {"a": 1}])
def test_eos_that_is_no_id(value: object, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: eos_token_id"):
        read_end_tokens(write(tmp_path, config={"eos_token_id": value}))


def test_markers_typed_as_text_are_one_token_each_and_named(tmp_path: Path) -> None:
    """`<|im_start|>` is built by the template, `<think>` is text that a model writes."""
    template = (
        "{% for m in messages %}{{ '<|im_' + 'start|>' }}{{ m.role }}\n{{ m.content }}<|im_end|>"
        "{% endfor %}{% if false %}<think>{% endif %}"
    )
    tokens = {
        "<|im_start|>": NORMAL,
        "<|im_end|>": NORMAL,
        "<think>": NORMAL,
        "<div>": NORMAL,
        "ab": NORMAL,
    }
    path = gguf_file(tmp_path / "a.gguf", tokens, template, ("a b",))
    ends = read_end_tokens(path)
    assert ends.mistyped == ("<|im_start|>", "<|im_end|>", "<think>")
    assert texts(ends) == ["<|im_end|>"]
