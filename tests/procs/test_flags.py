"""The flags of `tokenloom serve`: one for every field, bounds named, nothing kept by hand."""

import msgspec
import pytest

from tokenloom.flags import build_parser, parse_flags
from tokenloom.wire.config import ServerConfig


def fields() -> list[tuple[str, str]]:
    return [
        (group.name, field.name)
        for group in msgspec.structs.fields(ServerConfig)
        for field in msgspec.structs.fields(group.default)
    ]


def test_no_flag_gives_the_defaults() -> None:
    assert parse_flags([]) == ServerConfig()


def test_every_field_has_a_flag_that_says_what_it_is() -> None:
    actions = {action.dest: action for action in build_parser("x")._actions}
    for group, field in fields():
        action = actions[f"{group}.{field}"]
        assert action.option_strings[0] == "--" + field.replace("_", "-")
        assert action.help


@pytest.mark.parametrize(
    ("argv", "group", "field", "value"),
    [
        (["--page-size", "4"], "scheduling", "page_size", 4),
        (["--block-size=4"], "scheduling", "page_size", 4),
        (["--max-num-seqs", "7"], "scheduling", "max_running_requests", 7),
        (["--mem-fraction-static", ".25"], "execution", "mem_fraction", 0.25),
        (["--kv-tokens", "900"], "execution", "kv_tokens", 900),
        (["--model-path", "m.gguf"], "model", "model", "m.gguf"),
        (["--served-model-name", "null"], "model", "served_model_name", "null"),
        (["--served-model-name", "50%"], "model", "served_model_name", "50%"),
        (["--dtype", "bfloat16"], "execution", "dtype", "bfloat16"),
        (["--disable-radix-cache"], "scheduling", "disable_radix_cache", True),
        (["--no-disable-radix-cache"], "scheduling", "disable_radix_cache", False),
        (["--drain-timeout", "0"], "runtime", "drain_timeout", 0.0),
        (["--port", "1", "--port", "2"], "doors", "port", 2),
        (["--lora", "a=/x,pinned", "--lora=b=y=z"], "lora", "lora", ("a=/x,pinned", "b=y=z")),
        (["--lora-root", "/x", "--lora-root", "y"], "lora", "lora_root", ("/x", "y")),
        (["--max-loras", "2"], "lora", "max_loras_per_batch", 2),
        (["--tp", "2"], "execution", "tensor_parallel", 2),
        (["--tensor-parallel-size", "4"], "execution", "tensor_parallel", 4),
    ],
)
def test_flag_sets_its_field_and_no_other(
    argv: list[str], group: str, field: str, value: object
) -> None:
    default = ServerConfig()
    changed = msgspec.structs.replace(getattr(default, group), **{field: value})
    assert parse_flags(argv) == msgspec.structs.replace(default, **{group: changed})


@pytest.mark.parametrize(
    ("argv", "flag", "limit"),
    [
        (["--page-size", "0"], "--page-size", "at least 1 and at most 256"),
        (["--page-size", "4.0"], "--page-size", "a whole number"),
        (["--port", "65536"], "--port", "at most 65535"),
        (["--mem-fraction", "1"], "--mem-fraction", "above 0 and below 1"),
        (["--mem-fraction", "nan"], "--mem-fraction", "above 0 and below 1"),
        (["--start-timeout", "inf"], "--start-timeout", "finite"),
        (["--kv-tokens", "null"], "--kv-tokens", "a whole number at least 1"),
        (["--dtype", "float8"], "--dtype", "one of auto"),
        (["--chunked-prefill-size", "8"], "--chunked-prefill-size 8", "--page-size 16"),
        (["--max-prefill-tokens", "9"], "--max-prefill-tokens 9", "--page-size 16"),
        (["--lora", "/x"], "--lora", "NAME=PATH[,pinned]"),
        (["--lora", "a:b=/x"], "--lora", "NAME=PATH[,pinned]"),
        (["--lora", "a="], "--lora", "NAME=PATH[,pinned]"),
        (["--lora-root", ""], "--lora-root", "DIR"),
        (["--lora", "a=/x", "--lora", "a=/y"], "--lora", "twice"),
        (["--max-loaded-loras", "7"], "--max-loaded-loras 7", "--max-loras-per-batch 8"),
        (
            [*["--max-loaded-loras", "1", "--max-loras", "1"], "--lora", "a=/x", "--lora", "b=/x"],
            "--max-loaded-loras 1",
            "--lora: 2",
        ),
        (["--tp", "0"], "--tensor-parallel", "at least 1"),
        (["--tp", "2", "--dtype", "int8"], "--tp 2", "int8"),
        (["--tp", "4", "--lora", "a=/x"], "--tp 4", "not with --lora"),
        (["--tp", "4", "--lora-root", "/x"], "--tp 4", "not with --lora-root"),
        (["--log-level"], "--log-level", "expected one argument"),
        (["--page", "4"], "--page", "there is no flag"),
        (["--served-model-name", "\udcff"], "--served-model-name", "text in UTF-8"),
        (["--lora", "a=/\udcff"], "--lora", "NAME=PATH[,pinned]"),
        (["model.gguf"], "model.gguf", "belongs to no flag"),
    ],
)
def test_bad_flag_is_one_line_that_names_flag_and_limit(
    argv: list[str], flag: str, limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_flags(argv)
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert flag in line
    assert limit in line


@pytest.mark.parametrize(
    "argv",
    [
        ["--api-key", "sk-secret"],
        ["--api-key=sk-secret"],
        ["-k", "sk-secret"],
        ["--api-key", "sk-secret", "--port", "1", "more"],
        ["https://me:sk-secret@host/model"],
        ["--page-size", "tcp://me:sk-secret@host:1"],
    ],
)
def test_a_secret_on_the_command_line_is_not_repeated(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_flags(argv)
    assert "sk-secret" not in capsys.readouterr().err


def test_help_is_complete(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_flags(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    first, empty, *_ = shown.splitlines()
    assert first == "usage: tokenloom serve [--model MODEL] [--port N] [options]"
    assert not empty
    examples = [
        line.split("   ")[0].split() for line in shown.splitlines() if "  tokenloom" in line
    ]
    assert len(examples) >= 3
    for _, command, *argv in examples:
        assert command == "serve"
        parse_flags(argv)
    for _, field in fields():
        assert "--" + field.replace("_", "-") in shown
    assert "(default: 30000)" in shown
    assert "--max-model-len" in shown
