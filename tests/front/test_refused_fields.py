"""What is not honoured is refused by name at every route, wherever it stands, in a fixed order."""

import json
import subprocess
import sys

import msgspec
import pytest
from front.echo_door import Door

from tokenloom.tokenizer_proc.doors import native, openai_requests
from tokenloom.tokenizer_proc.doors.body import BodyReader
from tokenloom.tokenizer_proc.doors.client_frames import read_message
from tokenloom.tokenizer_proc.doors.refused_fields import UNSUPPORTED
from tokenloom.wire.messages import TokenizedGenerateReq
from tokenloom.wire.sampling import InvalidRequest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
READERS: dict[str, BodyReader] = {
    CHAT: openai_requests.chat_reader,
    COMPLETIONS: openai_requests.completion_reader,
    GENERATE: native.generate_reader,
    "sampling_params": native.sampling_reader,
}
WISH = {"never": "asked for"}  # no field takes it for nothing


def placed(where: str, **fields: object) -> tuple[str, dict[str, object]]:
    """A route and a good body of it with `fields` where they belong."""
    if where == CHAT:
        return CHAT, {"messages": [{"role": "user", "content": "a"}], **fields}
    if where == COMPLETIONS:
        return COMPLETIONS, {"prompt": "a", **fields}
    if where == GENERATE:
        return GENERATE, {"text": "a", **fields}
    return GENERATE, {"text": "a", "sampling_params": fields}  # which may hold what is no prompt


REFUSED = [(where, name) for where, reader in READERS.items() for name in reader.refused]


@pytest.fixture(scope="module")
def door() -> Door:
    return Door(max_queued=1000).start()


@pytest.mark.parametrize(("where", "name"), REFUSED)
def test_a_wish_is_refused_and_its_absence_is_not(door: Door, where: str, name: str) -> None:
    answer = door.post(*placed(where, **{name: WISH}))
    assert (answer.status, answer.error()["param"]) == (400, name)
    assert answer.error()["message"].startswith(f"{name} is not supported")
    for nothing in (None, *READERS[where].refused[name].neutral):
        assert door.post(*placed(where, **{name: nothing})).status == 200


@pytest.mark.parametrize("where", READERS)
def test_the_table_holds_everywhere(where: str) -> None:
    reader = READERS[where]
    assert set(UNSUPPORTED) <= set(reader.refused) | set(reader.struct.__struct_fields__)


@pytest.mark.parametrize(
    ("where", "name", "instead"),
    [
        (GENERATE, "max_tokens", "sampling_params.max_new_tokens"),
        (GENERATE, "temperature", "sampling_params.temperature"),
        ("sampling_params", "max_tokens", "sampling_params.max_new_tokens"),
        ("sampling_params", "stream", "stream beside sampling_params"),
        (CHAT, "max_new_tokens", "max_tokens"),
        (COMPLETIONS, "sampling_params", "its members in the body itself"),
        (CHAT, "lora_path", "the adapter's name as model"),
    ],
)
def test_another_routes_field_says_what_to_use(
    door: Door, where: str, name: str, instead: str
) -> None:
    message = door.post(*placed(where, **{name: 5})).error()["message"]
    assert message == f"{name} is not supported here; use {instead}"


@pytest.mark.parametrize("encode", [msgspec.json.encode, msgspec.msgpack.encode])
@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"sampling": {"regex": "a"}}, "regex", "regex is not supported"),
        ({"tools": []}, "tools", "tools is not supported"),
        (
            {"sampling": {"max_tokens": 5}},
            "max_tokens",
            "max_tokens is not supported here; use sampling.max_new_tokens",
        ),
        ({"wish": 1}, "wish", "wish is an unknown field"),
    ],
)
def test_the_socket_names_them(encode, fields, param, message) -> None:  # type: ignore[no-untyped-def]  # noqa: ANN001
    payload = encode({"type": "generate", "rid": "r", "text": "a", **fields})
    with pytest.raises(InvalidRequest) as caught:
        read_message(payload)
    assert (caught.value.param, caught.value.message) == (param, message)


ORDER = """
from tokenloom.tokenizer_proc.doors import openai_requests
from tokenloom.wire.sampling import InvalidRequest
body = b'{"messages":[],"ebnf":"x","n":2,"tools":[1],"top_logprobs":3,"max_new_tokens":1}'
try:
    openai_requests.read_chat(body)
except InvalidRequest as error:
    print(error.param)
"""


def test_the_first_of_several_is_the_same_under_every_hash_seed() -> None:
    said = {
        subprocess.run(
            [sys.executable, "-P", "-c", ORDER],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }
    assert said == {"n\n"}


ECHOES = [
    placed(CHAT, messages=[{"role": "x" * 50_000, "content": "a"}]),
    placed(CHAT, messages=[{"role": "user", "content": [{"type": "x" * 50_000}]}]),
    placed(CHAT, model="x" * 50_000),
    placed(CHAT, rid="x" * 50_000),
    placed(CHAT, user="x" * 50_000),
    placed(GENERATE, return_logprob="x" * 50_000),
    placed(GENERATE, lora_path="x" * 50_000),
    placed(GENERATE, model="x" * 50_000),
    placed("sampling_params", stop="x" * 50_000),
    placed("sampling_params", logit_bias={"x" * 50_000: 1}),
    placed("sampling_params", max_new_tokens=int("9" * 4000)),
    ("/load_lora_adapter", {"lora_name": "x" * 50_000, "lora_path": "y" * 50_000}),
    ("/v1/models/" + "x" * 5000, {}),
]


@pytest.mark.parametrize(("path", "body"), ECHOES)
def test_an_error_repeats_little_of_the_clients_value(path: str, body: dict[str, object]) -> None:
    door = Door(max_body_bytes=1 << 20).start()
    method = "GET" if path.startswith("/v1/models") else "POST"
    answer = door.call(method, path, json.dumps(body).encode())
    assert 400 <= answer.status < 500
    assert len(answer.body) < 1000


TAKEN = [
    ("max_tokens", 4.0, "max_new_tokens", 4),
    ("max_tokens", -1, "max_new_tokens", None),
    ("max_tokens", None, "max_new_tokens", 16),
    ("min_tokens", 2.0, "min_new_tokens", 2),
    ("top_k", 5.0, "top_k", 5),
    ("seed", 7.0, "seed", 7),
    ("seed", (1 << 53) + 1, "seed", (1 << 53) + 1),
    ("stop_token_ids", [4.0, 5], "stop_token_ids", (4, 5)),
]


@pytest.mark.parametrize(("field", "value", "ours", "taken"), TAKEN)
def test_numbers_as_clients_write_them(
    door: Door, field: str, value: object, ours: str, taken: object
) -> None:
    assert door.post(*placed(COMPLETIONS, **{field: value})).status == 200
    sampling = door.scheduler.of(TokenizedGenerateReq)[-1].sampling
    assert getattr(sampling, ours) == (255 if taken is None else taken)


def test_a_priority_may_be_written_as_a_float(door: Door) -> None:
    assert door.post(*placed(CHAT, priority=-3.0)).status == 200
    assert door.scheduler.of(TokenizedGenerateReq)[-1].priority == -3
    assert door.post(*placed(CHAT, priority=1.5)).error()["param"] == "priority"


@pytest.mark.parametrize("user", ["a\nb", "\x1b[31m", "\u202e", "\0"])
def test_a_user_may_hold_any_character(door: Door, user: str) -> None:
    assert door.post(*placed(CHAT, user=user)).status == 200
    assert door.scheduler.of(TokenizedGenerateReq)[-1].tenant == user


@pytest.mark.parametrize("where", [CHAT, COMPLETIONS, "sampling_params"])
@pytest.mark.parametrize("seed", [-1, -1.0, None])
def test_seed_minus_one_is_random(door: Door, where: str, seed: object) -> None:
    before = len(door.scheduler.of(TokenizedGenerateReq))
    for _ in range(2):
        assert door.post(*placed(where, seed=seed)).status == 200
    first, second = (r.sampling.seed for r in door.scheduler.of(TokenizedGenerateReq)[before:])
    assert first != second
    assert -1 not in (first, second)


@pytest.mark.parametrize("size", [256, 5000])
def test_a_prompt_that_is_too_long_has_a_code(size: int) -> None:
    door = Door(max_body_bytes=1 << 20).start()
    bodies = [
        placed(CHAT, messages=[{"role": "user", "content": "a" * size}]),
        placed(COMPLETIONS, prompt="a" * size),
        placed(COMPLETIONS, prompt=[1] * size),
        placed(COMPLETIONS, prompt=[[1] * size, [1]]),
        placed(COMPLETIONS, max_tokens=size),
        (GENERATE, {"text": "a" * size}),
        (GENERATE, {"input_ids": [1] * size}),
    ]
    for path, body in bodies:
        answer = door.post(path, body)
        assert answer.status == 400
        assert answer.error()["code"] == "context_length_exceeded"
        assert answer.error()["type"] == "invalid_request_error"


def test_generate_takes_a_model_name(door: Door) -> None:
    assert door.post(*placed(GENERATE, model="echo-1")).status == 200
    assert door.post(*placed(GENERATE, model=None)).status == 200
    assert door.post(*placed(GENERATE, model="another")).status == 404


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b'{"text":"a","text":"b"}', 200),  # the last one counts
        (b'{"text":"a","zzz":"\\ud800"}', 400),
        (b'{"text":"a","zzz":"\xff"}', 200),  # skipped unread
        (b'{"text":"\xff"}', 400),
        (b'{"text":"a","zzz":NaN}', 400),
        (b'{"text":"a","zzz":1e400}', 200),
        (b'{"text":"a","zzz":' + b"[" * 5000 + b"]" * 5000 + b"}", 400),
        (b'{"text":"a"}{}', 400),
    ],
)
def test_odd_json(raw: bytes, status: int) -> None:
    door = Door(max_body_bytes=1 << 20).start()
    assert door.post(GENERATE, raw).status == status
    if status == 200 and raw.count(b"text") == 2:
        assert door.scheduler.of(TokenizedGenerateReq)[0].input_ids[0] == ord("b")
