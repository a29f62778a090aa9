"""Long texts are tokenised beside the loop: others go on, and what waits there is bounded."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from front.echo_door import Door, Exchange, turn

from tokenloom.tokenizer_proc import encode_queue, lengths, limits
from tokenloom.wire.messages import TokenizedGenerateReq

LONG = "é" * limits.MAX_INLINE_CHARS  # on the limit; one more goes to the thread
ROUTES = ("/v1/chat/completions", "/v1/completions", "/generate")


class GatedEncoder:
    """Takes one token for a long text, and until the test opens the gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.threads: list[threading.Thread] = []
        self.begun = threading.Event()

    def encode(self, given: object) -> list[int]:
        self.threads.append(threading.current_thread())
        if threading.current_thread() is not threading.main_thread():
            self.begun.set()
            assert self.gate.wait(20)
        return [97]


@pytest.fixture
def encoder(monkeypatch: pytest.MonkeyPatch) -> Iterator[GatedEncoder]:
    monkeypatch.setattr(lengths, "MAX_CHARS_PER_TOKEN", 1 << 10)
    encoder = GatedEncoder()
    yield encoder
    encoder.gate.set()


def gated_door(encoder: GatedEncoder, max_queued: int = 64) -> Door:
    door = Door(max_queued=max_queued, max_body_bytes=1 << 20).start()
    door.front.use_text(encoder, encoder)
    return door


def body(text: str) -> dict[str, object]:
    return {"prompt": text, "text": text, "messages": [{"role": "user", "content": text}]}


async def begun(encoder: GatedEncoder) -> None:
    async with asyncio.timeout(10):
        while not encoder.begun.is_set():
            await turn()


@pytest.mark.parametrize("route", ROUTES)
def test_a_long_text_keeps_nobody_waiting(encoder: GatedEncoder, route: str) -> None:
    door = gated_door(encoder)

    async def scenario() -> Exchange:
        long = door.open("POST", route, body(LONG + "x"))
        await begun(encoder)
        short = await door.open("POST", route, body("hi")).end()
        assert (short.status, long.status) == (200, 0)
        encoder.gate.set()
        return await long.end()

    assert door.run(scenario()).status == 200


def test_short_texts_are_encoded_at_once(encoder: GatedEncoder) -> None:
    door = gated_door(encoder)
    for route in ROUTES:
        assert door.post(route, body(LONG)).status == 200
    assert set(encoder.threads) == {threading.main_thread()}


def test_many_short_texts_are_a_long_one(encoder: GatedEncoder) -> None:
    encoder.gate.set()
    door = gated_door(encoder)
    half = "x" * (limits.MAX_INLINE_CHARS // 2 + 1)
    assert door.post("/v1/completions", {"prompt": [half, half]}).status == 200
    assert threading.main_thread() not in encoder.threads


def test_what_waits_is_bounded_and_a_client_that_leaves_waits_no_more(
    encoder: GatedEncoder,
) -> None:
    door = gated_door(encoder, max_queued=2)

    async def scenario() -> tuple[Exchange, Exchange]:
        first = door.open("POST", "/generate", body(LONG + "x"))
        await begun(encoder)
        second = door.open("POST", "/generate", body(LONG + "x"))
        async with asyncio.timeout(10):
            while door.front._encoding._waiting < 2:
                await turn()
        refused = await door.open("POST", "/generate", body(LONG + "x")).end()
        second.leave()
        await second.end()
        assert (second.status, len(encoder.threads)) == (0, 1)
        encoder.gate.set()
        return refused, await first.end()

    refused, first = door.run(scenario())
    assert (refused.status, refused.headers["retry-after"]) == (503, "1")
    assert first.status == 200
    assert len(encoder.threads) == 1  # the text of the one that left was never looked at
    assert len(door.scheduler.of(TokenizedGenerateReq)) == 1


def test_a_refusal_in_the_thread_is_an_answer(encoder: GatedEncoder) -> None:
    encoder.gate.set()
    door = gated_door(encoder)
    encoder.encode = lambda _: []  # type: ignore[method-assign]
    answer = door.post("/v1/completions", body(LONG + "x"))
    assert (answer.status, answer.error()["message"]) == (400, "the prompt is empty")


class Recorder:
    """Notes what it encodes; one text in the thread waits for the gate."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.seen: list[str] = []

    def encode(self, text: str) -> list[int]:
        assert self.gate.wait(20)
        self.seen.append(text[0])
        return [97] * (300 if text[0] == "L" else 1)  # the context of the echo door has 256


async def encoded(recorder: Recorder, calls: list[list[str]]) -> list[object]:
    """What becomes of calls that are made one after the other, while the first text is held."""
    door = Door().start()
    door.front.use_text(recorder, recorder)  # type: ignore[arg-type]
    tasks = [asyncio.create_task(door.front.encode_texts(texts)) for texts in calls]
    while door.front._encoding._waiting < len(calls):
        await turn()
    recorder.gate.set()
    return await asyncio.gather(*tasks, return_exceptions=True)


@pytest.fixture
def recorder(encoder: GatedEncoder) -> Recorder:
    return Recorder()


def text(first: str) -> str:
    return first + "x" * limits.MAX_INLINE_CHARS


def test_callers_take_turns_whatever_they_bring(recorder: Recorder) -> None:
    calls = [[text("a")] * 5, [text("b")] * 2, [text("c")]]
    asyncio.run(encoded(recorder, calls))
    assert "".join(recorder.seen) == "abcabaaa"


def test_a_call_ends_at_its_first_text_that_is_too_long(recorder: Recorder) -> None:
    (failed, other) = asyncio.run(
        encoded(recorder, [[text("a"), text("L"), *[text("z")] * 28], [text("b")]])
    )
    assert getattr(failed, "code", None) == "context_length_exceeded"
    assert other == [[97]]
    assert sorted(recorder.seen) == ["L", "a", "b"]


def test_what_a_caller_that_left_still_had_is_never_encoded(recorder: Recorder) -> None:
    async def scenario() -> None:
        door = Door().start()
        door.front.use_text(recorder, recorder)  # type: ignore[arg-type]
        leaves = asyncio.create_task(door.front.encode_texts([text("a")] * 5))
        stays = asyncio.create_task(door.front.encode_texts([text("b")]))
        while door.front._encoding._waiting < 2:
            await turn()
        leaves.cancel()
        recorder.gate.set()
        assert await stays == [[97]]

    asyncio.run(scenario())
    assert recorder.seen.count("a") <= 1
    assert recorder.seen.count("b") == 1


def test_short_texts_of_a_long_call_are_encoded_together(recorder: Recorder) -> None:
    """Each piece of work in the thread has up to MAX_INLINE_CHARS characters."""
    half = "h" * (limits.MAX_INLINE_CHARS // 2)
    pieces = list(encode_queue._pieces([half, half, half, text("l"), "s"], len))
    assert [len(piece) for piece in pieces] == [2, 1, 1, 1]
