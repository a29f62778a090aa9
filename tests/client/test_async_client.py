"""AsyncClient against a real socket door before a front whose answers the test writes."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from door_fakes import FakeStream, run, served, until

from tokenloom.client import (
    AsyncClient,
    RequestRefused,
    RequestTimeout,
    ServerGone,
    Timeouts,
)
from tokenloom.client.request import SamplingOptions
from tokenloom.tokenizer_proc.errors import Refused
from tokenloom.tokenizer_proc.labels import Labels
from tokenloom.wire import paths
from tokenloom.wire.client_messages import ChatMessage, Usage
from tokenloom.wire.messages import Finish
from tokenloom.wire.sampling import InvalidRequest, SamplingParams

STOP = Finish("stop", matched=7)
QUICK = Timeouts(connect=0.05, answer=0.05, idle=0.05)
Leave = Callable[[AsyncClient], Awaitable[None]]


def test_the_options_are_the_sampling_params() -> None:
    assert SamplingOptions.__annotations__.keys() == set(SamplingParams.__struct_fields__)


def test_a_stream_and_what_is_known_after_it(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup, AsyncClient(setup.address) as client:
            setup.front.on_submit = lambda stream: stream.push("Hel", (1, 2))
            answer = client.generate("hey", max_new_tokens=9, stop=".", stop_token_ids=[4])
            texts = []
            async for delta in answer:
                texts.append((delta.text, delta.token_ids))
                if len(texts) == 1:
                    assert (answer.text, answer.finish_reason) == ("Hel", None)
                    setup.front.streams[0].push("lo", (3,), STOP)
            assert texts == [("Hel", [1, 2]), ("lo", [3])]
            assert (answer.text, answer.token_ids) == ("Hello", [1, 2, 3])
            assert (answer.finish_reason, answer.matched_stop) == ("stop", 7)
            assert answer.usage == Usage(3, 3, 3)
            assert setup.front.streams[0].sampling == SamplingParams(
                max_new_tokens=9, stop=(".",), stop_token_ids=(4,)
            )
            with pytest.raises(RuntimeError, match="only once"):
                async for _ in answer:
                    pass

    run(main())


def test_all_three_kinds_of_prompt(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup, AsyncClient(setup.address) as client:
            setup.front.on_submit = lambda stream: stream.push("ok", (1,), STOP)
            chat = [{"role": "system", "content": "s"}, ChatMessage("user", "u")]
            assert (await client.complete("ab")).text == "ok"
            assert (await client.complete(messages=chat)).finish_reason == "stop"
            assert (await client.complete(input_ids=[8, 9])).usage == Usage(2, 1, 3)
            assert setup.front.streams[0].input_ids == [97, 98]
            assert "".join(map(chr, setup.front.streams[1].input_ids)) == "system:s|user:u"
            assert setup.front.streams[2].input_ids == [8, 9]

    run(main())


def test_wrong_calls_are_python_errors(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncClient(f"ipc://{tmp_path}/none.sock") as client:
            with pytest.raises(ValueError, match="exactly one"):
                client.generate()
            with pytest.raises(ValueError, match="exactly one"):
                client.generate("a", input_ids=[1])
            with pytest.raises(TypeError, match="temprature"):
                client.generate("a", temprature=1.0)  # type: ignore[call-arg]
            with pytest.raises(ValueError, match="role"):
                client.generate(messages=[{"content": "x"}])
        with pytest.raises(paths.BadAddress):
            AsyncClient("http://127.0.0.1:30000")

    run(main())


def test_fifty_streams_over_one_socket(tmp_path: Path) -> None:
    def answer(stream: FakeStream) -> None:
        for piece in range(3):
            stream.push(f"{stream.input_ids[0]}:{piece} ", (piece,))
        stream.push("end", (), STOP)

    async def one(client: AsyncClient, number: int) -> None:
        text = ""
        async for delta in client.generate(input_ids=[number]):
            text += delta.text
        assert text == f"{number}:0 {number}:1 {number}:2 end"

    async def main() -> None:
        async with served(tmp_path) as setup, AsyncClient(setup.address) as client:
            setup.front.on_submit = answer
            await asyncio.gather(*(one(client, number) for number in range(50)))

    run(main())


async def leave_by_break(client: AsyncClient) -> None:
    answer = client.generate("x")
    async for _ in answer:
        break
    await until(lambda: answer.finish_reason == "abort")


async def leave_by_exception(client: AsyncClient) -> None:
    async def read() -> None:
        async for _ in client.generate("x"):
            raise KeyError

    with pytest.raises(KeyError):
        await read()


async def leave_by_aclose(client: AsyncClient) -> None:
    answer = client.generate("x")
    assert await answer.read() is not None
    await answer.aclose()
    assert (answer.finish_reason, await answer.read()) == ("abort", None)


async def leave_by_cancellation(client: AsyncClient) -> None:
    begun = asyncio.Event()

    async def read() -> None:
        async for _ in client.generate("x"):
            begun.set()

    task = asyncio.create_task(read())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_a_completion(client: AsyncClient) -> None:
    await client.ping()  # connecting is not part of what is left
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await client.complete("x")


async def leave_by_timeout(client: AsyncClient) -> None:
    async with AsyncClient(client.address, timeout=Timeouts(idle=0.02)) as impatient:
        answer = impatient.generate("x")
        assert await answer.read() is not None
        with pytest.raises(RequestTimeout, match=r"0\.02"):
            await answer.read()


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_break,
        leave_by_exception,
        leave_by_aclose,
        leave_by_cancellation,
        leave_a_completion,
        leave_by_timeout,
    ],
)
def test_leaving_early_aborts(tmp_path: Path, leave: Leave) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup, AsyncClient(setup.address) as client:
            setup.front.on_submit = lambda stream: stream.push("x", (1,))
            await leave(client)
            await until(lambda: all(stream.closed for stream in setup.front.streams))
            assert setup.front.streams
            assert (await client.ping()).ready  # the connection is still good

    run(main())


def test_a_request_that_is_never_answered_times_out_and_is_aborted(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup, AsyncClient(setup.address, timeout=QUICK) as client:
            with pytest.raises(RequestTimeout):
                await client.complete("x")
            with pytest.raises(RequestTimeout):
                await client.generate("x").read()
            await until(lambda: [s.closed for s in setup.front.streams] == [True, True])

    run(main())


def test_refusals_carry_status_message_and_field(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup, AsyncClient(setup.address) as client:
            with pytest.raises(RequestRefused) as wrong:
                await client.complete("x", temperature=float("nan"))
            assert (wrong.value.status, wrong.value.param) == (400, "temperature")
            with pytest.raises(RequestRefused) as unsendable:
                await client.complete("\ud800")
            assert unsendable.value.status == 400
            with pytest.raises(RequestRefused) as unsendable:
                await client.complete("x", seed=1 << 70)
            assert unsendable.value.status == 400
            with pytest.raises(RequestRefused) as large:
                await client.complete("x" * paths.MAX_REQUEST_BYTES)
            assert large.value.status == 413
            setup.front.trouble = InvalidRequest("prompt", "too long")
            with pytest.raises(RequestRefused, match="too long"):
                await client.generate("x").read()
            setup.front.trouble = None
            setup.front.on_submit = lambda stream: (
                stream.push("so far", (1,)),
                stream.push("", (), Finish("error", None, "broke", 500)),
            )
            answer = client.generate("x")
            with pytest.raises(RequestRefused) as broke:
                async for _ in answer:
                    pass
            assert (broke.value.status, answer.text) == (500, "so far")
            assert answer.finish_reason is None

    run(main())


def test_a_busy_server_says_when_to_come_back(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup, AsyncClient(setup.address) as client:
            setup.front.trouble = Refused(503, "the queue is full", 30)
            with pytest.raises(RequestRefused) as refused:
                await client.complete("x")
            assert (refused.value.status, refused.value.retry_after) == (503, 30)

    run(main())


def test_labels_are_keyword_arguments(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup, AsyncClient(setup.address) as client:
            setup.front.on_submit = lambda stream: stream.push("ok", (1,), STOP)
            await client.complete("x", priority=4, user="ada", cache_salt="s", top_k=3)
            assert setup.front.streams[0].labels == Labels(4, "ada", "s")
            assert setup.front.streams[0].sampling == SamplingParams(top_k=3)
            with pytest.raises(RequestRefused) as refused:
                await client.complete("x", user="u" * 257)
            assert refused.value.param == "user"

    run(main())


def test_flushing_the_cache(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup, AsyncClient(setup.address) as client:
            assert await client.flush_cache() == 0
            assert await client.flush_cache(timeout_s=0.25) == 25
            setup.front.trouble = Refused(409, "2 requests run")
            with pytest.raises(RequestRefused, match="2 requests run") as refused:
                await client.flush_cache()
            assert refused.value.status == 409

    run(main())


def test_adapters(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup, AsyncClient(setup.address) as client:
            setup.front.on_submit = lambda stream: stream.push("ok", (1,), STOP)
            assert await client.loras() == []
            assert await client.load_lora("a", "/a") == ["a"]
            assert await client.load_lora("b", "/b", pinned=True) == ["a", "b"]
            assert setup.front.adapters.pinned == {"b"}
            await client.complete("x", lora_path="b")
            await client.generate("x", lora_path=None).read()
            assert [stream.lora_id for stream in setup.front.streams] == [2, 0]
            assert await client.unload_lora("a") == ["b"]
            for call, status in (
                (client.load_lora("c", "c"), 400),
                (client.unload_lora("a"), 404),
                (client.complete("x", lora_path="a"), 404),
            ):
                with pytest.raises(RequestRefused) as refused:
                    await call
                assert refused.value.status == status
            assert await client.loras() == ["b"]

    run(main())


def test_without_a_server(tmp_path: Path) -> None:
    async def main() -> None:
        address = f"ipc://{tmp_path}/none.sock"
        async with AsyncClient(address, timeout=QUICK) as client:
            for call in (client.ping(), client.complete("x"), client.generate("x").read()):
                with pytest.raises(ServerGone, match="no server answers at"):
                    await call

    run(main())


def test_a_peer_that_is_no_server_of_ours() -> None:
    """It takes the connection and says nothing: without a handshake there is no server."""

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:
            address = f"tcp://127.0.0.1:{other.getsockname()[1]}"
            async with AsyncClient(address, timeout=QUICK) as client:
                with pytest.raises(ServerGone, match="no server answers at"):
                    await client.ping()

    run(main())


def test_a_restarted_server_is_found_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with AsyncClient(f"ipc://{tmp_path}/door.sock") as client:
            async with served(tmp_path) as setup:
                setup.front.on_submit = lambda stream: stream.push("x", (1,))
                reading = asyncio.create_task(client.complete("y"))
                answer = client.generate("x")
                assert await answer.read() is not None
                await setup.front.stream(1)
            with pytest.raises(RequestRefused, match="stopping"):
                await answer.read()
            with pytest.raises(RequestRefused, match="stopping"):
                await reading
            assert client._link is not None
            await until(lambda: not client._link._up.is_set())  # its kernel told it
            async with served(tmp_path) as setup:
                setup.front.on_submit = lambda stream: stream.push("back", (1,), STOP)
                assert (await client.complete("x")).text == "back"

    run(main())


def test_a_server_that_dies_without_a_word(tmp_path: Path) -> None:
    async def main() -> None:
        address = f"ipc://{tmp_path}/door.sock"
        context = zmq.asyncio.Context()
        router = context.socket(zmq.ROUTER)
        router.bind(address)
        async with AsyncClient(address) as client:
            answer = client.generate("x")
            reading = asyncio.create_task(answer.read())
            await router.recv_multipart()
            context.destroy(linger=0)
            with pytest.raises(ServerGone, match="lost the server"):
                await reading
            assert answer.finish_reason is None
            async with served(tmp_path) as setup:
                assert (await client.ping()).model == setup.front.model_name

    run(main())


def test_a_request_caught_by_a_disconnect_is_ended_at_the_next_server(tmp_path: Path) -> None:
    """Sent before the client could know; ZeroMQ hands it to the next server all the same."""

    async def main() -> None:
        address = f"ipc://{tmp_path}/door.sock"
        context = zmq.asyncio.Context()
        router = context.socket(zmq.ROUTER)
        router.bind(address)
        async with AsyncClient(address) as client:
            reading = asyncio.create_task(client.ping())
            peer, _ = await router.recv_multipart()
            await router.send_multipart([peer, b'{"type":"pong","seq":1,"model":"m","ready":true}'])
            await reading
            assert client._link is not None
            context.destroy(linger=0)
            look = client._link._note_pending_events
            client._link._note_pending_events = lambda: setattr(  # it did not see it coming
                client._link, "_note_pending_events", look
            )
            with pytest.raises(ServerGone, match="lost the server"):
                await client.complete("x")
            async with served(tmp_path) as setup:
                await client.ping()  # behind the request and its Abort on the same road
                assert all(stream.closed for stream in setup.front.streams)
                assert not setup.door._live

    run(main())


def test_garbage_from_a_server_is_dropped(tmp_path: Path) -> None:
    async def main() -> None:
        address = f"ipc://{tmp_path}/door.sock"
        context = zmq.asyncio.Context()
        router = context.socket(zmq.ROUTER)
        router.bind(address)
        async with AsyncClient(address) as client:
            reading = asyncio.create_task(client.ping())
            peer, _ = await router.recv_multipart()
            for frames in ([b"\xc1"], [b"{"], [b""], [b'{"type":"done"}'], [b"a", b"b"]):
                await router.send_multipart([peer, *frames])
            unread = b'{"type":"failed","rid":"","status":400,"message":"?"}'
            await router.send_multipart([peer, unread])
            pong = b'{"type":"pong","seq":1,"model":"m","ready":false}'
            await router.send_multipart([peer, pong])
            assert (await reading).model == "m"
        context.destroy(linger=0)

    run(main())


def test_closing_ends_what_is_in_flight(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup:
            client = AsyncClient(setup.address)
            reading = asyncio.create_task(client.complete("x"))
            stream = await setup.front.stream(0)
            await client.aclose()
            await client.aclose()
            with pytest.raises(ServerGone, match="closed"):
                await reading
            with pytest.raises(ServerGone, match="closed"):
                await client.ping()
            await until(lambda: stream.closed)

    run(main())


def test_a_forgotten_client_ends_with_its_loop(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup:
            client = AsyncClient(setup.address)
            setup.front.on_submit = lambda stream: stream.push("x", (1,))
            async for _ in client.generate("x"):
                break

    run(main())


def test_a_client_stays_with_its_loop(tmp_path: Path) -> None:
    client = AsyncClient(f"ipc://{tmp_path}/door.sock")

    async def main() -> None:
        async with served(tmp_path):
            assert (await client.ping()).ready

    run(main())

    async def again() -> None:
        with pytest.raises(RuntimeError, match="event loop"):
            await client.ping()

    run(again())
