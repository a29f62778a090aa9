"""Clients that die, freeze, or leave work behind: the door lets go of their requests."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq
from door_fakes import FakeFront, run, served, until

from tokenloom.tokenizer_proc.doors.router import DoorLimits
from tokenloom.wire import codec
from tokenloom.wire.client_messages import Generate, Pong

CLIENT = """
import sys, zmq
dealer = zmq.Context().socket(zmq.DEALER)
dealer.connect(sys.argv[1])
for rid in range(10):
    dealer.send(b'{"type":"generate","rid":"%d","text":"x","stream":%s}'
                % (rid, [b"true", b"false"][rid % 2]))
while True:
    dealer.recv()
"""


@contextmanager
def client_process(address: str) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", CLIENT, address])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def all_closed(front: FakeFront) -> bool:
    return all(stream.closed for stream in front.streams)


def test_a_killed_client_frees_all_its_requests(tmp_path: Path) -> None:
    """ABT-06: and others do not notice."""

    async def main() -> None:
        async with served(tmp_path) as setup:
            other = setup.client()
            await other.say(type="generate", rid="0", text="y")
            others = await setup.front.stream(0)
            with client_process(setup.address) as process:
                await until(lambda: len(setup.front.streams) == 11)
                process.send_signal(signal.SIGKILL)
                await until(lambda: all(s.closed for s in setup.front.streams if s is not others))
            assert not others.closed
            await other.say(type="ping")
            assert isinstance(await other.hear(), Pong)

    run(main())


def test_a_frozen_client_is_given_up(tmp_path: Path) -> None:
    async def main() -> None:
        limits = DoorLimits(heartbeat_seconds=0.1)
        async with served(tmp_path, limits) as setup:
            with client_process(setup.address) as process:
                await until(lambda: len(setup.front.streams) == 10)
                assert not any(stream.closed for stream in setup.front.streams)
                process.send_signal(signal.SIGSTOP)
                await until(lambda: all_closed(setup.front))

    run(main())


def send_and_leave(address: str, payload: bytes) -> None:
    """A client that comes and is gone; blocks until then."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 1000)
        dealer.connect(address)
        dealer.send(payload)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("times", [1, 20])
def test_clients_that_leave_at_once(tmp_path: Path, stream: bool, times: int) -> None:
    """Whether a request or its client's end is read first, nothing goes on in the end."""

    async def main() -> None:
        async with served(tmp_path) as setup:
            if stream:  # a first row is sent to nobody
                setup.front.on_submit = lambda left: left.push("x", (1,))
            payload = codec.encode(Generate("a", text="x", stream=stream))
            for _ in range(times):
                await asyncio.to_thread(send_and_leave, setup.address, payload)
            client = setup.client()
            await client.say(type="ping")
            assert isinstance(await client.hear(), Pong)
            if not stream:
                client.close()
            await until(lambda: all_closed(setup.front))

    run(main())
