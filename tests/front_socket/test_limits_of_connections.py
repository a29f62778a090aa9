"""What one connection may cost: time for a handshake and a message, room, questions, silence."""

import asyncio
import socket
from pathlib import Path

from door_fakes import run, served, until
from zmtp_client import connect, greeted, is_closed

from tokenloom.tokenizer_proc.doors import zmtp
from tokenloom.tokenizer_proc.doors.router import DoorLimits
from tokenloom.tokenizer_proc.limits import MAX_SOCKET_QUESTIONS
from tokenloom.wire.client_messages import Flushed, LoRAs, Pong


async def ended(plain: socket.socket) -> bool:
    with plain:
        return await asyncio.to_thread(is_closed, plain)


def test_a_connection_without_a_handshake_is_closed_in_time(tmp_path: Path) -> None:
    async def main() -> None:
        limits = DoorLimits(handshake_seconds=0.1, heartbeat_seconds=0.05)
        async with served(tmp_path, limits) as setup:
            for said in (b"", zmtp.SIGNATURE, zmtp.GREETING, zmtp.GREETING + b"\x04\x20"):
                silent = connect(setup.address)
                silent.sendall(said)
                assert await ended(silent)

    run(main())


def test_a_message_that_never_becomes_whole_is_given_up(tmp_path: Path) -> None:
    async def main() -> None:
        limits = DoorLimits(message_seconds=0.1, heartbeat_seconds=0.05)
        async with served(tmp_path, limits) as setup:
            slow = await asyncio.to_thread(greeted, setup.address)
            slow.sendall(zmtp.frame(b"the first half", more=True))
            assert await ended(slow)

    run(main())


def test_the_oldest_unfinished_message_makes_room(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path, DoorLimits(partial_bytes=2500)) as setup:
            half = b"\x02" + (2000).to_bytes(8) + bytes(1000)
            old, young = [await asyncio.to_thread(greeted, setup.address) for _ in range(2)]
            for plain, count in ((old, 1), (young, 2)):
                plain.sendall(half)
                await until(lambda count=count: len(setup.door._router._partial) == count)
            newest = await asyncio.to_thread(greeted, setup.address)
            newest.sendall(half)
            assert await ended(old)
            assert len(setup.door._router) == 2
            young.close()
            newest.close()

    run(main())


def test_at_the_limit_of_connections_who_has_not_greeted_goes_first(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path, DoorLimits(connections=2)) as setup:
            client = setup.client()
            await client.say(type="ping")
            assert isinstance(await client.hear(), Pong)
            silent = connect(setup.address)
            await until(lambda: len(setup.door._router) == 2)
            second = await asyncio.to_thread(greeted, setup.address)
            assert await ended(silent)
            assert await ended(connect(setup.address))  # both speak: nobody makes room
            await client.say(type="ping")
            assert isinstance(await client.hear(), Pong)
            second.close()

    run(main())


def test_a_peer_is_pinged_and_one_that_answers_is_kept(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path, DoorLimits(heartbeat_seconds=0.02)) as setup:
            mute = await asyncio.to_thread(greeted, setup.address)
            client = setup.client()  # libzmq answers by itself
            await client.say(type="generate", rid="a", text="x")
            stream = await setup.front.stream(0)
            assert await ended(mute)
            assert not stream.closed

    run(main())


def test_questions_of_one_client_that_wait_are_bounded(tmp_path: Path) -> None:
    async def main() -> None:
        async with served(tmp_path) as setup:
            client = setup.client()
            setup.front.slow = asyncio.Event()
            for seq in range(MAX_SOCKET_QUESTIONS):
                await client.say(type="flush_cache", seq=seq)
            await until(lambda: setup.door._questions.total() == MAX_SOCKET_QUESTIONS)
            await client.say(type="list_loras", seq=99)
            refused = await client.hear()
            assert isinstance(refused, LoRAs)
            assert (refused.seq, refused.status) == (99, 503)
            await client.say(type="ping")
            assert isinstance(await client.hear(), Pong)
            setup.front.slow.set()
            for _ in range(MAX_SOCKET_QUESTIONS):
                assert isinstance(await client.hear(), Flushed)
            assert not setup.door._questions

    run(main())
