"""Long texts are tokenised beside the loop: others go on, and what waits there is bounded."""

import asyncio
import threading
from collections.abc import Iterator

import pytest
from front.echo_door import Door, Exchange, turn

from tokenloom.tokenizer_proc import lengths, limits
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
