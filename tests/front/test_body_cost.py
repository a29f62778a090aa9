"""What a hostile body costs: passes over its bytes and memory for objects, counted, never timed."""

import gc
import json
import sys
import tracemalloc

import pytest
from front.echo_door import Door

from tokenloom.bench import body_cost
from tokenloom.bench.body_cost import Reader, hostile, hostile_frames
from tokenloom.tokenizer_proc.doors import body as bodies
from tokenloom.wire import codec
from tokenloom.wire.sampling import InvalidRequest

SIZE = 1 << 17
CONTEXT = 1 << 14
CASES = hostile(SIZE) | hostile_frames(SIZE)
# A dict or a list for every three or four bytes takes 24; a view for every three bytes 19.
MOST_MEMORY = 20  # bytes for each byte of the body


def read(reader: Reader, body: bytes) -> str:
    try:
        reader(body, CONTEXT)
    except InvalidRequest as error:
        return error.message
    return ""


@pytest.mark.parametrize("name", CASES)
def test_a_body_makes_few_objects(name: str) -> None:
    reader, body = CASES[name]
    gc.collect()
    tracemalloc.start()
    try:
        message = read(reader, body)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= MOST_MEMORY * len(body), peak / len(body)
    assert len(message) < 1000


@pytest.mark.parametrize("name", CASES)
def test_a_body_is_read_once_and_its_parts_once_more(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, body = CASES[name]
    passed: list[int] = []
    decode = bodies.decode

    def counted(part: bytes, *arguments: object) -> object:
        passed.append(len(bytes(part)))
        return decode(part, *arguments)

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a body is not for Python's own parser")

    monkeypatch.setattr(bodies, "decode", counted)
    monkeypatch.setattr(json, "loads", never)
    read(reader, body)
    assert sum(passed) <= 2 * len(body)


PATHS = {
    body_cost.read_chat: "/v1/chat/completions",
    body_cost.read_completion: "/v1/completions",
    body_cost.read_generate: "/generate",
}


@pytest.mark.parametrize("name", hostile(SIZE))
def test_a_body_takes_few_steps_from_its_first_byte_to_its_answer(name: str) -> None:
    """Calls of functions, Python's own included: nothing walks through what a client piled up."""
    reader, body = CASES[name]
    door = Door(max_body_bytes=1 << 20).start()
    calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    async def scenario() -> int:
        exchange = door.open("POST", PATHS[reader], body)
        sys.setprofile(count)
        try:
            return (await exchange.end()).status
        finally:
            sys.setprofile(None)

    assert door.run(scenario()) in (200, 400)
    assert calls < 5000


def test_what_is_refused_by_name_is_not_decoded() -> None:
    """The value of a refused field stays bytes, however long it is."""
    _, body = CASES["tools: {}"]
    reader = bodies.BodyReader(codec.msgspec.defstruct("Empty", []), {"tools": bodies.Refusal()})
    with pytest.raises(InvalidRequest, match="tools is not supported"):
        reader.read(body)
