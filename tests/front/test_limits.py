"""Bounds of the HTTP door and the front, each at its limit and one above."""

from typing import Any

import pytest
from front.echo_door import Door, submitted, turn

from tokenloom.tokenizer_proc import limits
from tokenloom.wire.messages import AbortReq, Finish, StrOut

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
POSTS = (CHAT, COMPLETIONS, GENERATE)


def sized(size: int) -> bytes:
    """A good body for every route, of exactly `size` bytes."""
    start = b'{"prompt": "a", "text": "a", "messages": [{"role": "user", "content": "a"}], "pad": "'
    return start + b"x" * (size - len(start) - 2) + b'"}'


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("pieces", [1, 7])
def test_bodies(door: Door, path: str, declared: bool, pieces: int) -> None:
    for size, status in [(4096, 200), (4097, 413)]:
        body = sized(size)
        cut = -(-size // pieces)
        payload = [body[at : at + cut] for at in range(0, size, cut)]
        headers = {"Content-Length": str(size)} if declared else {}
        answer = door.call("POST", path, payload, headers)
        assert answer.status == status
    assert answer.error()["code"] == "request_too_large"
    assert "4096" in answer.error()["message"]


def test_a_declared_length_is_refused_before_it_is_read(door: Door) -> None:
    async def scenario() -> Any:  # noqa: ANN401
        call = door.open("POST", CHAT, [b"", b"never read"], {"Content-Length": "999999999999999"})
        return (await call.end()).status, len(call._pieces)

    assert door.run(scenario()) == (413, 2)


def test_a_lying_length_does_not_help(door: Door) -> None:
    answer = door.call("POST", CHAT, [sized(5000)], {"Content-Length": "10"})
    assert answer.status == 413


def test_an_endless_body_is_cut_at_the_limit(door: Door) -> None:
    pieces = [b"x" * 1000] * 1000

    async def scenario() -> int:
        call = door.open("POST", CHAT, pieces)
        assert (await call.end()).status == 413
        return len(call._pieces)

    assert door.run(scenario()) == 995


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
def test_compressed_bodies_are_refused(door: Door, encoding: str) -> None:
    answer = door.call("POST", CHAT, sized(200), {"Content-Encoding": encoding})
    assert (answer.status, answer.error()["code"]) == (415, "unsupported_media_type")
    assert door.call("POST", CHAT, sized(200), {"Content-Encoding": "identity"}).status == 200


def test_headers(door: Door) -> None:
    for count, status in [(limits.MAX_HEADERS, 200), (limits.MAX_HEADERS + 1, 431)]:
        headers = {f"x-{index}": "v" for index in range(count)}
        assert door.call("GET", "/health", b"", headers).status == status
    for size, status in [(limits.MAX_HEADER_BYTES, 200), (limits.MAX_HEADER_BYTES + 1, 431)]:
        headers = {"x-a": "v" * (size - len("x-a"))}
        assert door.call("GET", "/health", b"", headers).status == status


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        ("abc-1._:Z", "abc-1._:Z"),
        ("x" * limits.MAX_REQUEST_ID_CHARS, "x" * limits.MAX_REQUEST_ID_CHARS),
        ("x" * (limits.MAX_REQUEST_ID_CHARS + 1), None),
        ("a b", None),
        ("a\r\nset-cookie: b", None),
        ("a\n", None),
        ("", None),
    ],
)
def test_request_ids(door: Door, given: str, echoed: str | None) -> None:
    for path, payload in [("/health", b""), ("/nowhere", b""), (CHAT, sized(200)), (CHAT, b"{")]:
        method = "POST" if path == CHAT else "GET"
        answer = door.call(method, path, payload, {"X-Request-Id": given})
        assert answer.headers.get("x-request-id") == echoed


def test_prompts_of_one_call() -> None:
    door = Door(max_queued=200, max_body_bytes=1 << 20).start()
    most = limits.MAX_PROMPTS
    for path, field in [
        (COMPLETIONS, "prompt"),
        (GENERATE, "text"),
    ]:
        assert door.post(path, {field: ["a"] * most}).status == 200
        answer = door.post(path, {field: ["a"] * (most + 1)})
        assert (answer.status, answer.error()["param"]) == (400, field)
    assert door.post(GENERATE, {"input_ids": [[97]] * (most + 1)}).status == 400


def test_long_texts_are_refused_before_they_are_tokenised() -> None:
    door = Door(max_body_bytes=1 << 20).start()
    calls = []
    encode = door.front._text[0].encode
    door.front._text[0].encode = lambda text: calls.append(len(text)) or encode(text)
    most = 256 * limits.MAX_CHARS_PER_TOKEN
    for size in (most, most + 1):
        for path, payload in [
            (COMPLETIONS, {"prompt": "x" * size}),
            (GENERATE, {"text": "x" * size}),
            (CHAT, {"messages": [{"role": "user", "content": "x" * size}]}),
        ]:
            answer = door.post(path, payload)
            assert answer.status == 400
            assert ("characters" in answer.error()["message"]) == (size > most)
    assert calls == [most, most]


@pytest.mark.parametrize("path", POSTS)
def test_a_full_queue_answers_503(path: str) -> None:
    door = Door(max_queued=2).start()
    door.scheduler.hold = True

    async def scenario() -> Any:  # noqa: ANN401
        held = [door.open("POST", path, sized(200)) for _ in range(2)]
        await submitted(door, 2)
        refused = await door.open("POST", path, sized(200)).end()
        door.scheduler.row(StrOut(1, "", (), Finish("length")))
        door.scheduler.row(StrOut(2, "", (), Finish("length")))
        for call in held:
            assert (await call.end()).status == 200
        door.scheduler.hold = False
        assert (await door.open("POST", path, sized(200)).end()).status == 200
        return refused

    answer = door.run(scenario())
    assert answer.status == 503
    assert int(answer.headers["retry-after"]) > 0
    assert "2 requests are in flight" in answer.error()["message"]


def test_a_list_of_prompts_that_does_not_fit_leaves_nothing_behind() -> None:
    door = Door(max_queued=2).start()

    async def scenario() -> int:
        answer = await door.open("POST", COMPLETIONS, {"prompt": ["a", "b", "c"]}).end()
        for _ in range(3):
            await turn()
        return answer.status

    assert door.run(scenario()) == 503
    assert door.front.in_flight == 0
    assert len(door.scheduler.of(AbortReq)) == 2


def test_a_client_that_does_not_read_is_cut_off(door: Door) -> None:
    door.scheduler.hold = True

    async def scenario() -> Any:  # noqa: ANN401
        call = door.open("POST", GENERATE, {"text": "x", "stream": True})
        await submitted(door)
        door.scheduler.row(StrOut(1, "a", (97,)))
        await call.until(lambda: b"a" in call.body)
        call.stalled = True
        for _ in range(3):  # one on its way, the others pile up
            door.scheduler.row(StrOut(1, "b", (98,) * limits.MAX_UNREAD_TOKENS))
            await turn()
            await turn()
        assert door.scheduler.of(AbortReq) == [AbortReq(1)]
        door.scheduler.row(StrOut(1, "late", (99,)))
        call.read_on()
        return await call.end()

    *events, error, done = door.run(scenario()).events()
    assert done == "[DONE]"
    assert [event["text"] for event in events] == ["a", "ab"]
    assert "did not read" in error["error"]["message"]
    assert door.front.late_rows >= 1
