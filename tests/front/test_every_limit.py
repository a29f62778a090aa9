"""Every limit of a request, one below, at and one above it: the table of docs/limits.md, tried out.

What is not a bound of one request, such as a time, is listed with the test that tries it.
"""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from front.echo_door import Door
from support.source_tree import ROOT

from tokenloom.tokenizer_proc import adapters, limits
from tokenloom.tokenizer_proc.doors.client_frames import read_message
from tokenloom.tokenizer_proc.doors.errors import ApiError
from tokenloom.tokenizer_proc.errors import listed, quoted, shortened
from tokenloom.tokenizer_proc.lengths import check_chars
from tokenloom.wire.messages import SchedulerInfo
from tokenloom.wire.sampling import InvalidRequest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
CONTEXT = 8192
INFO = SchedulerInfo(512, CONTEXT, 16, 1 << 20, 8, 64, "float32", (0,))


@dataclass(frozen=True)
class Case:
    """A body with `count` of what the limit counts; above it, `status` and the field's name."""

    name: str
    path: str
    body: Callable[[int], dict[str, object] | bytes]
    param: str | None
    status: int = 400
    limit: int | None = None  # where it is not the constant itself


def chat(**fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1, **fields}


def generate(**sampling: object) -> dict[str, object]:
    return {"text": "a", "sampling_params": {"max_new_tokens": 1, **sampling}}


def padded(body: dict[str, object], size: int) -> bytes:
    """A body of exactly `size` bytes."""
    raw = json.dumps(body | {"metadata": ""}).encode()
    return raw[:-2] + b"x" * (size - len(raw)) + raw[-2:]


def padded_sampling(size: int) -> bytes:
    """A list of sampling_params of exactly `size` bytes for two prompts."""
    room = " " * (size - len("[{},{}]"))
    return ('{"text":["a","b"],"sampling_params":[{},' + room + "{}]}").encode()


def biases(count: int) -> dict[str, int]:
    return {str(index): 1 for index in range(count)}


def parts(count: int) -> dict[str, object]:
    return chat(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": ""}] * (count - 1)},
            {"role": "user", "content": [{"type": "text", "text": "a"}]},
        ]
    )


BODY = limits.BODY_OVERHEAD_BYTES + limits.BODY_BYTES_PER_TOKEN * CONTEXT
CASES = [
    Case("BODY_OVERHEAD_BYTES", GENERATE, lambda n: padded(generate(), n), None, 413, BODY),
    Case("BODY_BYTES_PER_TOKEN", CHAT, lambda n: padded(chat(), n), None, 413, BODY),
    Case("MAX_PROMPTS", COMPLETIONS, lambda n: {"prompt": ["a"] * n}, "prompt"),
    Case("MAX_PROMPTS", COMPLETIONS, lambda n: {"prompt": [[1]] * n}, "prompt"),
    Case("MAX_PROMPTS", GENERATE, lambda n: {"text": ["a"] * n}, "text"),
    Case("MAX_PROMPTS", GENERATE, lambda n: {"input_ids": [[1]] * n}, "input_ids"),
    Case("MAX_MESSAGES", CHAT, lambda n: chat(messages=chat()["messages"] * n), "messages"),
    Case("MAX_CONTENT_PARTS", CHAT, parts, "messages"),
    Case("MAX_SAMPLING_BYTES", GENERATE, padded_sampling, "sampling_params"),
    Case("MAX_LABEL_CHARS", CHAT, lambda n: chat(user="u" * n), "user"),
    Case("MAX_LABEL_CHARS", GENERATE, lambda n: generate() | {"cache_salt": "s" * n}, "cache_salt"),
    Case("MAX_REQUEST_ID_CHARS", CHAT, lambda n: chat(rid="r" * n), "rid"),
    Case("MAX_REQUEST_ID_CHARS", GENERATE, lambda n: generate() | {"rid": "r" * n}, "rid"),
    Case("MAX_LOGIT_BIAS", CHAT, lambda n: chat(logit_bias=biases(n)), "logit_bias"),
    Case("MAX_LOGIT_BIAS", GENERATE, lambda n: generate(logit_bias=biases(n)), "logit_bias"),
    Case("MAX_STOP_STRINGS", CHAT, lambda n: chat(stop=["x"] * n), "stop"),
    Case("MAX_STOP_CHARS", GENERATE, lambda n: generate(stop="x" * n), "stop"),
    Case("MAX_STOP_TOKEN_IDS", CHAT, lambda n: chat(stop_token_ids=[1] * n), "stop_token_ids"),
    Case("CONTEXT", COMPLETIONS, lambda n: {"prompt": [1] * n}, "prompt", 400, CONTEXT - 1),
    Case("CONTEXT", GENERATE, lambda n: {"input_ids": [1] * n}, "input_ids", 400, CONTEXT - 1),
    Case("CONTEXT", GENERATE, lambda n: {"text": "a" * n}, "text", 400, CONTEXT - 1),
]


@pytest.fixture(scope="module")
def door() -> Door:
    return Door(max_queued=1000, max_body_bytes=4 << 20).start(INFO)


@pytest.mark.parametrize("step", [-1, 0, 1])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{case.path}")
def test_requests(door: Door, case: Case, step: int) -> None:
    limit: int = case.limit or getattr(limits, case.name)
    answer = door.post(case.path, case.body(limit + step))
    assert answer.status == (200 if step <= 0 else case.status)
    if step > 0:
        error = answer.error()
        assert error["param"] == case.param
        assert error["code"] == {"CONTEXT": "context_length_exceeded"}.get(
            case.name, {413: "request_too_large"}.get(case.status)
        )


def frame(**fields: object) -> bytes:
    return json.dumps({"type": "generate", "rid": "r", **fields}).encode()


def padded_frame(size: int) -> bytes:
    sampling = "{" + " " * (size - 2) + "}"
    return frame(text="a", sampling=0).replace(b"0}", sampling.encode() + b"}")


FRAMES: list[tuple[str, Callable[[int], bytes]]] = [
    ("MAX_INPUT_IDS", lambda n: frame(input_ids=[1] * n)),
    ("MAX_MESSAGES", lambda n: frame(messages=[{"role": "user", "content": "a"}] * n)),
    ("MAX_SAMPLING_BYTES", padded_frame),
    ("MAX_STOP_STRINGS", lambda n: frame(text="a", sampling={"stop": ["a"] * n})),
    ("MAX_STOP_TOKEN_IDS", lambda n: frame(text="a", sampling={"stop_token_ids": [1] * n})),
    ("MAX_LOGIT_BIAS", lambda n: frame(text="a", sampling={"logit_bias": biases(n)})),
]


@pytest.mark.parametrize("step", [-1, 0, 1])
@pytest.mark.parametrize(("name", "build"), FRAMES, ids=[name for name, _ in FRAMES])
def test_frames_of_the_socket(name: str, build: Callable[[int], bytes], step: int) -> None:
    limit: int = getattr(limits, name)
    payload = build(limit + step)
    if step <= 0:
        read_message(payload)
        return
    with pytest.raises(InvalidRequest, match=f"{limit}"):
        read_message(payload)


def test_characters_for_each_token() -> None:
    most = CONTEXT * limits.MAX_CHARS_PER_TOKEN
    for chars in (most - 1, most):
        check_chars(chars, INFO)
    with pytest.raises(InvalidRequest, match=str(most)) as caught:
        check_chars(most + 1, INFO)
    assert caught.value.code == "context_length_exceeded"


def test_what_a_message_repeats() -> None:
    most = limits.MAX_QUOTED_CHARS
    for count in (most - 1, most):
        assert quoted("x" * count) == repr("x" * count)
        assert shortened("x" * count) == "x" * count
    assert quoted("x" * (most + 1)) == repr("x" * most) + f"... ({most + 1} characters)"
    assert shortened("x" * (most + 1)) == "x" * most + f"... ({most + 1} characters)"
    for step in (-1, 0, 1):
        most = limits.MAX_ERROR_CHARS
        assert len(ApiError(400, "x" * (most + step)).body.error.message) == min(most + step, most)
    names = [f"n{index}" for index in range(limits.MAX_LISTED_NAMES + 1)]
    assert "more" not in listed(names[:-1])
    assert listed(names).endswith("and 1 more")


def test_short_texts_are_tokenised_at_once() -> None:
    """The thread is not started for a text at the limit, and is for one above it."""
    for step, threads in [(-1, 0), (0, 0), (1, 1)]:
        door = Door(max_body_bytes=1 << 20).start(INFO)
        asyncio.run(door.front.encode_texts(["x" * (limits.MAX_INLINE_CHARS + step)]))
        assert len(door.front._encoding._thread._threads) == threads


def test_paths_of_adapters() -> None:
    most = limits.MAX_PATH_CHARS
    for chars, reason in [(most - 1, "below"), (most, "below"), (most + 1, f"1 to {most}")]:
        with pytest.raises(InvalidRequest, match=reason):
            adapters._find("x" * chars, [], [])


# What is no bound of one request, and the test that tries it.
ELSEWHERE = {
    "MAX_REQUEST_BYTES": "tests/front_socket/test_socket_door.py",
    "MAX_KNOWN_LORAS": "tests/front/test_lora_registry.py",
    "MAX_BODIES_BYTES": "tests/front/test_body_budget.py",
}
HERE = {"MAX_QUOTED_CHARS", "MAX_LISTED_NAMES", "MAX_INLINE_CHARS", "MAX_PATH_CHARS"}
HERE |= {"MAX_CHARS_PER_TOKEN", "MAX_ERROR_CHARS"}


def test_no_limit_of_a_request_is_left_out() -> None:
    page = (ROOT / "docs/limits.md").read_text()
    section = page.partition("## Bodies and messages")[2].partition("\n## ")[0]
    stated = set(re.findall(r"^\| .* \| `([A-Z_]+)` \| ", section, re.MULTILINE))
    assert len(stated) > 15
    tried = {case.name for case in CASES} | {name for name, _ in FRAMES} | HERE
    assert stated <= tried | set(ELSEWHERE)
    for name, path in ELSEWHERE.items():
        assert name in Path(ROOT / path).read_text(), name
