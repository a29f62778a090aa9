"""Wrong input at every door is refused with the field and the limit; the next request is served."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest
import zmq
from support.server import PATIENCE_S, Server

from tokenloom.tokenizer_proc.limits import body_limit

pytestmark = pytest.mark.slow

LARGEST_ID = 49151
CONTEXT = 8192
LIMIT = {"/generate": "max_new_tokens"}
PROMPT = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/generate": "input_ids"}
ROUTES = list(PROMPT)


def body(route: str, prompt: object = ..., **sampling: object) -> dict[str, Any]:
    """Return a valid body of that route with the given changes."""
    if prompt is ...:
        right: dict[str, object] = {"/v1/chat/completions": [{"role": "user", "content": "Hi"}]}
        prompt = right.get(route, [1, 2, 3])
    sampling = {LIMIT.get(route, "max_tokens"): 2, **sampling}
    if route == "/generate":
        return {PROMPT[route]: prompt, "sampling_params": sampling}
    return {PROMPT[route]: prompt, **sampling}


def post(server: Server, route: str, content: bytes) -> httpx.Response:
    return server.http.post(f"{server.url}{route}", content=content)


def assert_refused(server: Server, route: str, content: bytes, param: str, *words: str) -> None:
    answer = post(server, route, content)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    for word in words:
        assert word in error["message"], error["message"]
    after = post(server, route, json.dumps(body(route)).encode())
    assert after.status_code == 200, "the next request is served"


SAMPLING = [
    ("temperature", "hot", "float"),
    ("temperature", -0.5, "between 0 and 100"),
    ("temperature", True, "float"),
    ("top_p", 0, "above 0 and at most 1"),
    ("top_k", -2, "between -1 and 2147483647"),
    ("min_p", 2, "between 0 and 1"),
    ("presence_penalty", 3, "between -2 and 2"),
    ("repetition_penalty", 0, "between 0.01 and 10"),
    ("seed", 2**64, "64 signed bits"),
    ("logit_bias", {str(LARGEST_ID + 1): 1}, f"0..{LARGEST_ID}"),
    ("logit_bias", {"5": 101}, "between -100 and 100"),
    ("stop", ["a"] * 17, "at most 16"),
    ("stop", "", "1 to 256 characters"),
    ("stop_token_ids", [-1], f"0..{LARGEST_ID}"),
    ("n", 2, "not supported"),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(("field", "value", "words"), SAMPLING)
def test_sampling(server: Server, route: str, field: str, value: object, words: str) -> None:
    content = json.dumps(body(route, **{field: value})).encode()
    assert_refused(server, route, content, field, words)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (0, "at least 1"),
        (-7, "at least 1"),
        (10**6, str(CONTEXT)),
        (10**30, "64 bits"),
        ("9", "int"),
    ],
)
def test_answer_length(server: Server, route: str, value: object, words: str) -> None:
    field = LIMIT.get(route, "max_tokens")
    content = json.dumps(body(route, **{field: value})).encode()
    assert_refused(server, route, content, field, words)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("constant", "param"), [("NaN", "body"), ("Infinity", "body"), ("1e999", "temperature")]
)
def test_temperature_that_is_no_number(
    server: Server, route: str, constant: str, param: str
) -> None:
    content = json.dumps(body(route, temperature=77)).encode()
    wrong = content.replace(b"77", constant.encode())
    assert_refused(server, route, wrong, param)


@pytest.mark.parametrize("route", ["/v1/completions", "/generate"])
@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([], "empty"),
        ([[]], "empty"),
        ([5, -1], "token id -1 at index 1"),
        ([LARGEST_ID + 1], f"0..{LARGEST_ID}"),
        ([2**40], f"0..{LARGEST_ID}"),
        ([5] * CONTEXT, f"{CONTEXT} tokens; the context has {CONTEXT}"),
        (5, "array"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_ids(server: Server, route: str, prompt: object, words: str) -> None:
    assert_refused(server, route, json.dumps(body(route, prompt)).encode(), PROMPT[route], words)


@pytest.mark.parametrize(
    ("route", "wrong", "param", "words"),
    [
        ("/v1/completions", {"prompt": ""}, "prompt", "is empty"),
        ("/generate", {"text": ""}, "text", "is empty"),
        ("/generate", {"text": "a", "input_ids": [1]}, "text", "exactly one"),
        ("/generate", {}, "text", "exactly one"),
        ("/v1/completions", {}, "prompt", "missing"),
        ("/v1/chat/completions", {"messages": []}, "messages", "1 to"),
        ("/v1/chat/completions", {"messages": "Hi"}, "messages", "array"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "king", "content": "Hi"}]},
            "messages[0].role",
            "king",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": 5}]},
            "messages[0].content",
            "int",
        ),
        ("/v1/completions", {"prompt": "so long " * 9000}, "prompt", f"the context has {CONTEXT}"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "so long " * 9000}]},
            "messages",
            f"the context has {CONTEXT}",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_prompts(
    server: Server, route: str, wrong: dict[str, object], param: str, words: str
) -> None:
    assert_refused(server, route, json.dumps(wrong).encode(), param, words)


@pytest.mark.parametrize(
    ("route", "content"),
    [
        ("/v1/completions", b'{"prompt": "a\\ud800b"}'),
        ("/generate", b'{"text": ["fine", "\\udfff"]}'),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "\\ud83d"}]}'),
        ("/generate", b'{"text": "a", "sampling_params": {"stop": ["\\ud800"]}}'),
    ],
)
def test_lone_surrogates(server: Server, route: str, content: bytes) -> None:
    answer = post(server, route, content)
    assert answer.status_code == 400
    assert "surrogate" in answer.json()["error"]["message"]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("content", [b"", b"[]", b'{"a":', b"\xff\xfe", b"[" * 100_000])
def test_bodies_that_are_no_object(server: Server, route: str, content: bytes) -> None:
    assert_refused(server, route, content, "body", "JSON")


@pytest.mark.parametrize("route", ROUTES)
def test_five_megabytes(server: Server, route: str) -> None:
    answer = post(server, route, json.dumps(body(route, "x" * (5 << 20))).encode())
    assert answer.status_code == 413
    assert str(body_limit(CONTEXT, 4 << 20)) in answer.json()["error"]["message"]
    assert post(server, route, json.dumps(body(route)).encode()).status_code == 200


def test_routes_and_methods(server: Server) -> None:
    assert server.http.get(f"{server.url}/v2/models").status_code == 404
    assert server.http.get(f"{server.url}/v1/completions").status_code == 405
    assert post(server, "/v1/completions", b'{"prompt": "a", "model": "x"}').status_code == 404


# -- the socket door


def generate(**fields: object) -> dict[str, object]:
    return {"type": "generate", "rid": "r", "input_ids": [1, 2], **fields}


def sampling(**fields: object) -> dict[str, object]:
    return generate(sampling={"max_new_tokens": 2, **fields})


SOCKET = [
    (sampling(temperature=float("nan")), "temperature", "between 0 and 100"),
    (sampling(temperature="hot"), "temperature", "float"),
    (sampling(max_new_tokens=0), "max_new_tokens", "at least 1"),
    (sampling(max_new_tokens=-2), "max_new_tokens", "at least 1"),
    (sampling(max_new_tokens=10**6), "max_new_tokens", str(CONTEXT)),
    (sampling(colour="red"), "colour", "colour"),
    (sampling(logit_bias={LARGEST_ID + 1: 1.0}), "logit_bias", f"0..{LARGEST_ID}"),
    (generate(input_ids=[]), "input_ids", "empty"),
    (generate(input_ids=[-1]), "input_ids", "token id -1"),
    (generate(input_ids=[LARGEST_ID + 1]), "input_ids", f"0..{LARGEST_ID}"),
    (generate(input_ids=[5] * CONTEXT), "input_ids", f"the context has {CONTEXT}"),
    (generate(input_ids=None, text=""), "text", "empty"),
    (generate(input_ids=None, text=5), "text", "str"),
    (generate(text="a"), "input_ids", "exactly one"),
    (generate(input_ids=None, messages=[]), "messages", "must be 1 to"),
    (generate(rid="a b"), "rid", "1 to 128"),
]


class RawClient:
    """A DEALER that sends any bytes."""

    def __init__(self, server: Server) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(server.door)

    def ask(self, payload: bytes) -> dict[str, Any]:
        """Return the terminal message that answers `payload`."""
        self._socket.send(payload)
        while True:
            assert self._socket.poll(PATIENCE_S * 1000), "no answer"
            given = self._socket.recv()
            decode = msgspec.json.decode if given.startswith(b"{") else msgspec.msgpack.decode
            answer: dict[str, Any] = decode(given)
            if answer["type"] != "delta":
                return answer

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def raw(server: Server) -> Iterator[RawClient]:
    client = RawClient(server)
    yield client
    client.close()


def assert_socket_serves(client: RawClient) -> None:
    answer = client.ask(msgspec.msgpack.encode(sampling() | {"rid": "next"}))
    assert (answer["type"], answer["rid"]) == ("done", "next")


@pytest.mark.parametrize(("message", "param", "words"), SOCKET, ids=lambda value: str(value)[:60])
def test_socket_door(raw: RawClient, message: dict[str, Any], param: str, words: str) -> None:
    answer = raw.ask(msgspec.msgpack.encode(message))
    assert (answer["type"], answer["status"], answer["param"]) == ("failed", 400, param)
    assert answer["rid"] == message["rid"]
    assert words in answer["message"]
    assert_socket_serves(raw)


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", b"hello", b"\x81" * 5000, b'{"type": "generate", "rid": "r", "text": "\xff"}'],
    ids=repr,
)
def test_bytes_that_are_no_message(raw: RawClient, payload: bytes) -> None:
    answer = raw.ask(payload)
    assert (answer["type"], answer["status"]) == ("failed", 400)
    assert_socket_serves(raw)


def test_five_megabytes_at_the_socket_door(raw: RawClient) -> None:
    answer = raw.ask(msgspec.msgpack.encode(generate(input_ids=None, text="x" * (5 << 20))))
    assert (answer["type"], answer["status"]) == ("failed", 413)
    assert str(4 << 20) in answer["message"]
    assert_socket_serves(raw)
