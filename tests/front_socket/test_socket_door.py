"""The socket door on a real ROUTER: its answers, and exactly one last word per request."""

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest
import zmq
from door_fakes import VOCAB, FakeFront, RawClient, Served, run, served, until

from tokenloom.tokenizer_proc.doors.router import DoorLimits
from tokenloom.tokenizer_proc.errors import Refused
from tokenloom.tokenizer_proc.labels import NO_LABELS, Labels
from tokenloom.wire import codec, paths
from tokenloom.wire.client_messages import Delta, Done, Failed, Flushed, Pong, Usage
from tokenloom.wire.messages import Finish
from tokenloom.wire.sampling import InvalidRequest

STOP = Finish("stop", matched=7)


@pytest.mark.parametrize("json", [False, True])
def test_a_stream_is_deltas_and_one_done(tmp_path: Path, json: bool) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup:
            client = setup.client(json=json)
            await client.say(
                type="generate", rid="a:1", text="hey", sampling={"temperature": 0.5, "stop": ["."]}
            )
            stream = await setup.front.stream(0)
            assert stream.input_ids == [ord(char) for char in "hey"]
            assert (stream.sampling.temperature, stream.sampling.stop) == (0.5, (".",))
            stream.push("Hel", (1, 2))
            assert await client.hear() == Delta("a:1", "Hel", [1, 2])
            stream.push("", (3,))
            assert await client.hear() == Delta("a:1", "", [3])
            stream.push("lo", (4,), STOP)
            assert await client.hear() == Done("a:1", "lo", [4], "stop", Usage(3, 4, 3), 7)
            await until(lambda: stream.closed)

    run(main())


def test_without_streaming_the_done_has_everything(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup:
            client = setup.client()
            await client.say(type="generate", rid="b", input_ids=[5, 6], stream=False)
            stream = await setup.front.stream(0)
            stream.push("one ", (1,))
            stream.push("two", (2,))
            stream.push("", (3,), Finish("length"))
            assert await client.hear() == Done("b", "one two", [1, 2, 3], "length", Usage(2, 3, 3))

    run(main())


def test_a_chat_is_encoded_by_the_front(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup:
            client = setup.client(json=True)
            messages = [{"role": "user", "content": "hi"}]
            await client.say(type="generate", rid="c", messages=messages)
            stream = await setup.front.stream(0)
            assert "".join(map(chr, stream.input_ids)) == "user:hi"

    run(main())


def test_a_req_socket_gets_its_envelope_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup:
            client = setup.client(zmq.REQ, json=True)
            await client.say(type="ping", seq=4)
            assert await client.hear() == Pong(4, "fake-model", True)
            await client.say(type="generate", rid="r", text="x", stream=False)
            (await setup.front.stream(0)).push("y", (1,), STOP)
            assert isinstance(await client.hear(), Done)

    run(main())


def test_it_serves_tcp_on_loopback_when_no_host_is_given() -> None:
    async def main() -> None:
        with zmq.Context() as context, context.socket(zmq.PULL) as probe:
            port = probe.bind_to_random_port("tcp://127.0.0.1")
        async with served(f"tcp://:{port}") as setup:
            assert setup.address == f"tcp://127.0.0.1:{port}"
            client = setup.client()
            await client.say(type="ping")
            assert await client.hear() == Pong(0, "fake-model", True)
            await client.say(type="generate", rid="t", text="x")
            stream = await setup.front.stream(0)
            client.close()
            await until(lambda: stream.closed)

    run(main())


def test_an_abort_ends_with_one_done_and_frees_the_rid(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup:
            client = setup.client()
            for streaming, unsent in ((True, ""), (False, "so far")):
                await client.say(type="generate", rid="a", text="x", stream=streaming)
                stream = await setup.front.stream(len(setup.front.streams))
                stream.push("so far", (1, 2))
                if streaming:
                    assert await client.hear() == Delta("a", "so far", [1, 2])
                else:
                    await until(lambda taken=stream: taken._rows.empty())
                await client.say(type="abort", rid="a")
                done = await client.hear()
                assert isinstance(done, Done)
                assert (done.text, done.finish_reason) == (unsent, "abort")
                assert done.usage == Usage(1, 2, 3)
                assert stream.closed
            await client.say(type="abort", rid="a")  # ended: nothing to say
            await client.say(type="abort", rid="never")
            await client.say(type="ping", seq=9)
            assert await client.hear() == Pong(9, "fake-model", True)

    run(main())


def test_an_abort_brings_the_text_that_was_held_back(tmp_path: Path) -> None:
    """Ids are counted when they come, their text may wait for the end of a stop string."""

    async def main() -> None:
        async with served(tmp_path) as setup:
            client = setup.client()
            await client.say(type="generate", rid="a", text="x", sampling={"stop": ["lo, you"]})
            stream = await setup.front.stream(0)
            stream.held_text = "lo"
            stream.push("Hel", (1, 2))
            assert await client.hear() == Delta("a", "Hel", [1, 2])
            await client.say(type="abort", rid="a")
            await client.say(type="abort", rid="a")
            assert await client.hear() == Done("a", "lo", [], "abort", Usage(1, 2, 3))
            await client.say(type="ping", seq=9)
            assert await client.hear() == Pong(9, "fake-model", True)

    run(main())


def test_an_abort_that_is_not_answered_ends_with_what_came(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path, DoorLimits(stall_seconds=0.05)) as setup:
            client = setup.client()
            await client.say(type="generate", rid="a", text="x")
            stream = await setup.front.stream(0)
            stream.answers_aborts = False
            await client.say(type="abort", rid="a")
            await until(lambda: stream.aborted)
            stream.push("more", (1,))
            assert await client.hear() == Done("a", "more", [1], "abort", Usage(1, 1, 3))

    run(main())


def test_an_abort_right_behind_its_request(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup:
            client = setup.client()
            for _ in range(20):
                await client.say(type="generate", rid="a", text="x")
                await client.say(type="abort", rid="a")
            answers = [await client.hear() for _ in range(20)]
            assert all(isinstance(a, Done) and a.finish_reason == "abort" for a in answers)
            assert all(stream.closed for stream in setup.front.streams)

    run(main())


def test_a_duplicate_rid_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup:
            client, other = setup.client(), setup.client()
            await client.say(type="generate", rid="a", text="x")
            stream = await setup.front.stream(0)
            await client.say(type="generate", rid="a", text="y")
            failed = await client.hear()
            assert isinstance(failed, Failed)
            assert (failed.rid, failed.status, failed.param) == ("a", 409, "rid")
            await other.say(type="generate", rid="a", text="z")  # its own namespace
            await setup.front.stream(1)
            await other.say(type="abort", rid="a")
            assert isinstance(await other.hear(), Done)
            assert not stream.closed
            stream.push("fine", (1,), STOP)
            assert isinstance(await client.hear(), Done)
            await client.say(type="generate", rid="a", text="again")
            await setup.front.stream(2)

    run(main())


def test_an_error_finish_and_a_cut_stream_are_failures(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup:
            client = setup.client()
            await client.say(type="generate", rid="a", text="x")
            (await setup.front.stream(0)).push("", (), Finish("error", None, "broken", 500))
            assert await client.hear() == Failed("a", 500, "broken")
            await client.say(type="generate", rid="c", text="x")
            full = Finish("error", None, "the queue is full", 503, 30)
            (await setup.front.stream(1)).push("", (), full)
            assert await client.hear() == Failed("c", 503, "the queue is full", retry_after=30)
            await client.say(type="generate", rid="b", text="x")
            (await setup.front.stream(2)).close()
            failed = await client.hear()
            assert isinstance(failed, Failed)
            assert (failed.rid, failed.status, failed.retry_after) == ("b", 503, 10)

    run(main())


def test_the_front_may_refuse_or_break(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup:
            client = setup.client()
            setup.front.trouble = Refused(503, "the server is busy", 1)
            await client.say(type="generate", rid="a", text="x")
            assert await client.hear() == Failed("a", 503, "the server is busy", retry_after=1)
            setup.front.trouble = KeyError("secret")
            await client.say(type="generate", rid="b", text="x")
            assert await client.hear() == Failed("b", 500, "internal error")
            await client.say(type="ping")
            assert isinstance(await client.hear(), Pong)

    with caplog.at_level(logging.CRITICAL):
        run(main())


def test_what_a_request_says_beside_its_prompt(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup:
            client = setup.client()
            await client.say(
                type="generate", rid="a", text="x", priority=-2, user="ada", cache_salt="s"
            )
            assert (await setup.front.stream(0)).labels == Labels(-2, "ada", "s")
            await client.say(type="generate", rid="b", text="x")
            assert (await setup.front.stream(1)).labels == NO_LABELS

    run(main())


def test_a_request_whose_text_is_being_encoded(tmp_path: Path) -> None:
    """It has its rid, others go on meanwhile, and an abort or a leaving client ends it."""

    async def main() -> None:
        async with served(tmp_path) as setup:
            client, other = setup.client(), setup.client()
            setup.front.slow = asyncio.Event()
            await client.say(type="generate", rid="a", text="long")
            await client.say(type="generate", rid="a", text="long")
            failed = await client.hear()
            assert isinstance(failed, Failed)
            assert (failed.rid, failed.status) == ("a", 409)
            await client.say(type="generate", rid="ids", input_ids=[1])
            (await setup.front.stream(0)).push("y", (1,), STOP)
            assert isinstance(await client.hear(), Done)
            await client.say(type="abort", rid="a")
            assert await client.hear() == Done("a", "", [], "abort", Usage(0, 0, 0))
            await other.say(type="generate", rid="b", text="long")
            await until(lambda: len(setup.door._tasks) == 1)
            other.close()
            await until(lambda: not setup.door._tasks)
            setup.front.slow.set()
            await client.say(type="generate", rid="a", text="long")
            await setup.front.stream(1)
            assert len(setup.front.streams) == 2

    run(main())


def test_flushing_the_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup:
            client = setup.client(json=True)
            await client.say(type="flush_cache", seq=5, timeout=0.5)
            assert await client.hear() == Flushed(5, 200, pages=50)
            for trouble, status, message in [
                (Refused(409, "2 requests run"), 409, "2 requests run"),
                (InvalidRequest("timeout", "timeout is wrong"), 400, "timeout is wrong"),
                (KeyError("secret"), 500, "internal error"),
            ]:
                setup.front.trouble = trouble
                await client.say(type="flush_cache", seq=6)
                assert await client.hear() == Flushed(6, status, message)

    with caplog.at_level(logging.CRITICAL):
        run(main())


GENERATE = {"type": "generate", "rid": "w", "text": "x"}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"type": "generate", "rid": "w"}, "text"),
        (GENERATE | {"input_ids": [1]}, "input_ids"),
        (GENERATE | {"messages": []}, "messages"),
        ({"type": "generate", "rid": "w", "input_ids": []}, "input_ids"),
        ({"type": "generate", "rid": "w", "input_ids": ["1"]}, "input_ids"),
        ({"type": "generate", "rid": "w", "messages": [{"role": "user"}]}, "messages"),
        ({"type": "generate", "rid": "w", "messages": [{"role": "x", "content": ""}]}, "messages"),
        (GENERATE | {"text": 5}, "text"),
        (GENERATE | {"text": ""}, "input_ids"),
        (GENERATE | {"best_of": 2}, "best_of"),
        (GENERATE | {"stream": "yes"}, "stream"),
        (GENERATE | {"sampling": {"temprature": 1}}, "temprature"),
        (GENERATE | {"sampling": {"temperature": "hot"}}, "temperature"),
        (GENERATE | {"sampling": {"temperature": -1}}, "temperature"),
        (GENERATE | {"sampling": {"temperature": float("nan")}}, "temperature"),
        (GENERATE | {"sampling": {"max_new_tokens": 0}}, "max_new_tokens"),
        (GENERATE | {"sampling": {"logit_bias": {"1": 2}}}, "logit_bias"),
        (GENERATE | {"sampling": {"stop_token_ids": [VOCAB]}}, "stop_token_ids"),
        (GENERATE | {"sampling": 3}, "sampling"),
        (GENERATE | {"rid": ""}, "rid"),
        (GENERATE | {"rid": "a b"}, "rid"),
        (GENERATE | {"rid": "a\n"}, "rid"),
        (GENERATE | {"rid": "a" * 129}, "rid"),
        (GENERATE | {"rid": 5}, "rid"),
        (GENERATE | {"priority": 1 << 31}, "priority"),
        (GENERATE | {"priority": None}, "priority"),
        (GENERATE | {"user": "u" * 257}, "user"),
        (GENERATE | {"cache_salt": ""}, "cache_salt"),
        (GENERATE | {"cache_salt": "s" * 257}, "cache_salt"),
        ({"type": "generate", "text": "x"}, "rid"),
        ({"type": "genrate", "rid": "w"}, "type"),
        ({"rid": "w"}, "type"),
        ({"type": "ping", "seq": "1"}, "seq"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, fields: dict[str, object], param: str) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup:
            client = setup.client()
            await client.say(**fields)
            failed = await client.hear()
            assert isinstance(failed, Failed)
            assert (failed.status, failed.param) == (400, param)
            rid = fields.get("rid", "")
            assert failed.rid == (rid[:128] if isinstance(rid, str) else "")
            assert not setup.front.streams

    run(main())


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\xc1"],
        [b"\xdf\xff\xff\xff\xff"],
        [b"{"],
        [b"[1]"],
        [b'\t{"type":'],
        [b'{"type":"generate","rid":"a","text":"\\ud800"}'],
        [b'{"type":"generate","rid":"a","text":"\xff"}'],
        [b'{"type":"generate","rid":"a","text":"x","sampling":{"temperature":NaN}}'],
        [b'{"a":' * 100_000],
        [b"\x91" * 100_000],
        [b'{"type":"ping"}', b'{"type":"ping"}'],
        [b"", b'{"type":"ping"}', b""],
        [b'{"' + b"x" * 100_000 + b'":1,"type":"ping"}'],
    ],
)
def test_any_bytes_get_an_answer_and_the_door_goes_on(tmp_path: Path, frames: list[bytes]) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup:
            client = setup.client(json=True)
            await client.socket.send_multipart(frames)
            answer = (await client.socket.recv_multipart())[-1]
            failed = codec.decode_to_client(answer)
            assert isinstance(failed, Failed)
            assert (failed.status, len(failed.message) <= 500) == (400, True)
            assert codec.is_json(answer) == codec.is_json(frames[-1][:1])
            await client.say(type="ping")
            assert isinstance(await client.hear(), Pong)

    run(main())


def test_a_message_above_the_limit_is_answered_with_413(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup:
            client = setup.client()
            await client.say(type="generate", rid="big", text="x" * paths.MAX_REQUEST_BYTES)
            failed = await client.hear()
            assert isinstance(failed, Failed)
            assert (failed.rid, failed.status) == ("big", 413)
            assert str(paths.MAX_REQUEST_BYTES) in failed.message
            await client.say(type="ping")
            assert isinstance(await client.hear(), Pong)

    run(main())


def test_fifty_clients_each_get_their_own(tmp_path: Path) -> None:
    async def one(setup: Served, number: int) -> None:
        client = setup.client(json=number % 2 == 0)
        await client.say(type="generate", rid="same", input_ids=[number + 1])
        heard = ""
        while isinstance(message := await client.hear(), Delta):
            heard += message.text
        assert isinstance(message, Done)
        assert heard + message.text == f"{number + 1},{number + 1}."

    async def main() -> None:
        front = FakeFront()

        def answer(stream: object) -> None:
            made = front.streams[-1]
            made.push(f"{made.input_ids[0]},", (1,))
            made.push(f"{made.input_ids[0]}.", (2,), STOP)

        front.on_submit = answer
        async with served(tmp_path, front=front) as setup:
            await asyncio.gather(*(one(setup, number) for number in range(50)))

    run(main())


def test_a_client_that_never_reads_costs_only_itself(tmp_path: Path) -> None:
    """Its request is aborted when the queue for it is full, and that is its last word."""

    async def main() -> None:
        limits = DoorLimits(unread_bytes=500_000)
        async with served(tmp_path, limits) as setup:
            deaf, client = setup.client(), setup.client()
            deaf.socket.setsockopt(zmq.RCVHWM, 1)
            deaf.socket.disconnect(setup.address)
            deaf.socket.connect(setup.address)
            await deaf.say(type="generate", rid="d", text="x")
            stream = await setup.front.stream(0)
            pushed = 0
            while not stream.closed:
                stream.push("x" * 100_000, (1,))
                pushed += 1
                assert pushed < 1000
                await asyncio.sleep(0)
            await client.say(type="generate", rid="c", text="x")
            (await setup.front.stream(1)).push("y", (1,), STOP)
            assert isinstance(await client.hear(), Done)
            while isinstance(last := await deaf.hear(), Delta):
                pass
            assert isinstance(last, Failed)
            assert (last.rid, last.status) == ("d", 408)

    run(main())


def test_the_door_says_a_last_word_when_it_closes(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup:
            client = RawClient(setup.address)
            await client.say(type="generate", rid="a", text="x")
            stream = await setup.front.stream(0)
        assert await client.hear() == Failed("a", 503, "the server is stopping", retry_after=10)
        assert stream.closed
        assert not (tmp_path / "door.sock").exists()
        client.close()

    run(main())


def test_json_answers_are_plain_json(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup:
            client = setup.client(json=True)
            await client.say(type="ping", seq=2)
            assert msgspec.json.decode(await client.socket.recv()) == {
                "type": "pong",
                "seq": 2,
                "model": "fake-model",
                "ready": True,
            }

    run(main())
