"""Bodies made to be expensive or wrong, and long texts: refused or served, in nobody's way."""

import json
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from attack.witness import unharmed
from support.server import PATIENCE_S, Server

pytestmark = pytest.mark.attack

SIZE = 1_500_000  # just below what a body may have with a context of 8192
TEXT = 131_000  # just below the characters that a text may have
AT_ONCE = 8


def filled(piece: bytes, before: bytes = b"[", after: bytes = b"]") -> bytes:
    """A body of SIZE bytes whose unknown field is full of one piece."""
    value = before + b",".join([piece] * (SIZE // (len(piece) + 1))) + after
    return b'{"text":"hi","sampling_params":{"max_new_tokens":1},"unknown":' + value + b"}"


def repeated(name: str, piece: bytes) -> bytes:
    """A body of SIZE bytes whose field is a list of one piece."""
    many = b",".join([piece] * (SIZE // (len(piece) + 1)))
    return b'{"sampling_params":{"max_new_tokens":1},"' + name.encode() + b'":[' + many + b"]}"


KEYS = b",".join(b'"%x":1' % number for number in range(SIZE // 10))
MESSAGE = b'{"role":"user","content":"a"}'
PARTS = b'{"type":"text","text":"a"}'
BODIES: dict[str, tuple[str, bytes, set[int]]] = {
    "objects": ("/generate", filled(b"{}"), {200}),
    "objects and a NaN": ("/generate", filled(b"{}", after=b",NaN]"), {400}),
    "lists": ("/generate", filled(b"[1]"), {200}),
    "large exponents": ("/generate", filled(b"1e999"), {200, 400}),
    "keys": ("/generate", filled(KEYS[: SIZE // 2], b"{", b"}"), {200, 400, 413}),
    "escapes": ("/generate", b'{"text":"' + b"\\u0041" * (SIZE // 6) + b'"}', {400}),
    "ids": ("/generate", repeated("input_ids", b"1"), {400}),
    "lists of ids": ("/generate", repeated("input_ids", b"[1]"), {400}),
    "prompts": ("/generate", repeated("text", b'"a"'), {400}),
    "messages": ("/v1/chat/completions", repeated("messages", MESSAGE), {400}),
    "parts": (
        "/v1/chat/completions",
        repeated("messages", b'{"role":"user","content":[' + b",".join([PARTS] * 1000) + b"]}"),
        {400},
    ),
    "nested lists": ("/generate", filled(b"[" * 500_000 + b"]" * 500_000), {400}),
    "lists that do not end": ("/generate", filled(b"[" * 700_000), {400}),
    "a number of a million digits": ("/generate", repeated("input_ids", b"9" * 1_000_000), {400}),
    "half of a surrogate pair": ("/generate", b'{"text":"\\ud800"}', {400}),
    "bytes that are no text": ("/generate", b'{"text":"\xff\xfe"}', {400}),
    "nothing": ("/generate", b"", {400}),
    "spaces": ("/generate", b" " * SIZE, {400}),
    "two bodies": ("/generate", b'{"text":"a"}{"text":"b"}', {400}),
}


def post(server: Server, route: str, body: bytes) -> httpx.Response:
    headers = {"Content-Type": "application/json"}
    return httpx.post(f"{server.url}{route}", content=body, headers=headers, timeout=PATIENCE_S)


@pytest.mark.parametrize("name", BODIES)
def test_a_hostile_body(server: Server, name: str) -> None:
    route, body, statuses = BODIES[name]
    with unharmed(server) as witness:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = [pool.submit(post, server, route, body) for _ in range(AT_ONCE)]
            witness.gets_on()
        for answer in (future.result() for future in answers):
            assert answer.status_code in statuses, answer.text[:300]
            assert len(answer.content) < 5000, "no error repeats what was sent"


def letters(alphabet: str) -> str:
    return "".join(random.Random(1).choices(alphabet, k=TEXT))


TEXTS: dict[str, Callable[[], str]] = {
    "one letter": lambda: "a" * TEXT,
    "spaces": lambda: " " * TEXT,
    "line breaks": lambda: "\n" * TEXT,
    "digits": lambda: "7" * TEXT,
    "one word of random letters": lambda: letters("abcdefghij"),
    "random signs": lambda: letters("".join(map(chr, range(33, 127)))),
    "accents": lambda: "e" + "\u0301" * (TEXT - 1),
    "joined emoji": lambda: "\U0001f468\u200d" * (TEXT // 2),
    "ideographs": lambda: letters("".join(map(chr, range(0x4E00, 0x9FFF)))),
    "private use": lambda: letters("".join(map(chr, range(0xF0000, 0xF8000)))),
    "apostrophes": lambda: "'" * TEXT,
    "special tokens": lambda: "<|im_start|>" * (TEXT // 12),
    "halves of special tokens": lambda: "<|im_" * (TEXT // 5),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_hostile_text(server: Server, name: str) -> None:
    """As a prompt and as a message: 400 where it has more tokens than the context."""
    text = TEXTS[name]()
    chat = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    prompt = {"text": text, "sampling_params": {"max_new_tokens": 1}}
    calls = [("/generate", prompt), ("/v1/chat/completions", chat)]
    with unharmed(server) as witness, ThreadPoolExecutor(len(calls)) as pool:
        answers = [
            pool.submit(post, server, route, json.dumps(body, ensure_ascii=False).encode())
            for route, body in calls
        ]
        witness.gets_on()
        assert {answer.result().status_code for answer in answers} <= {200, 400}


def test_many_long_prompts_leave_room_for_another(server: Server) -> None:
    """Calls of many long prompts do not keep the short or long prompt of another waiting."""
    long = "".join(random.Random(2).choices("abcdefghij", k=45_000))
    many = {"text": [long] * 30, "sampling_params": {"max_new_tokens": 1}}
    body = json.dumps(many).encode()
    with unharmed(server) as witness, ThreadPoolExecutor(AT_ONCE) as pool:
        answers = [pool.submit(post, server, "/generate", body) for _ in range(AT_ONCE)]
        for prompt in ("hi", "word " * 1000):
            assert server.generate(prompt, max_new_tokens=1)["output_ids"]
        witness.gets_on()
        assert {answer.result().status_code for answer in answers} <= {400, 413}
