"""Outbox, Mailbox and AsyncMailbox over real ipc sockets."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from tokenloom.wire import codec
from tokenloom.wire.channel import (
    IPC_PATH_LIMIT,
    AddressTooLong,
    AsyncMailbox,
    CannotBind,
    Mailbox,
    Outbox,
    check_ipc_path,
)
from tokenloom.wire.messages import AbortReq, StatsReq, ToScheduler

WAIT_MS = 5000


@pytest.fixture
def context() -> Iterator["zmq.Context[zmq.Socket[bytes]]"]:
    context = zmq.Context()
    yield context
    context.destroy(linger=0)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/box.sock"


def receive(mailbox: Mailbox[ToScheduler], count: int) -> list[ToScheduler]:
    messages: list[ToScheduler] = []
    while len(messages) < count:
        came = mailbox.receive(WAIT_MS)
        assert came, "nothing came"
        messages += came
    return messages


def test_messages_arrive_in_order(context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
    mailbox = Mailbox(context, address, codec.to_scheduler())
    outbox = Outbox(context, address)
    sent = [AbortReq(rid) for rid in range(3000)]  # more than ZeroMQ's default limit
    for message in sent:
        outbox.send(message)
    assert receive(mailbox, len(sent)) == sent
    assert mailbox.receive() == []
    assert mailbox.receive(1) == []
    outbox.close()
    mailbox.close()


def test_the_writer_may_come_first(context: "zmq.Context[zmq.Socket[bytes]]", address: str) -> None:
    outbox = Outbox(context, address)
    outbox.send(StatsReq(1))
    mailbox = Mailbox(context, address, codec.to_scheduler())
    assert receive(mailbox, 1) == [StatsReq(1)]
    outbox.close()
    mailbox.close()


def test_many_writers_share_a_mailbox(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str
) -> None:
    mailbox = Mailbox(context, address, codec.to_scheduler())
    outboxes = [Outbox(context, address) for _ in range(3)]
    for rid, outbox in enumerate(outboxes):
        outbox.send(AbortReq(rid))
        outbox.close()  # lingers until it is sent
    came = receive(mailbox, 3)
    mailbox.close()
    assert {message.rid for message in came if isinstance(message, AbortReq)} == {0, 1, 2}


MALFORMED = [
    [b""],
    [b"\xc1"],
    [b"{}"],
    [b"\x91" * 100_000],
    [codec.encode(AbortReq(1))[:-1]],
    [codec.encode(AbortReq(1)), b"more"],
    [b"\x92\xa7Unknown\x01"],
    [b"\x92\xa8AbortReq\xa1x"],
]


def test_malformed_frames_are_dropped_and_counted(
    context: "zmq.Context[zmq.Socket[bytes]]", address: str
) -> None:
    mailbox = Mailbox(context, address, codec.to_scheduler())
    with context.socket(zmq.PUSH) as push:
        push.connect(address)
        for frames in MALFORMED:
            push.send_multipart(frames)
        push.send(codec.encode(AbortReq(9)))
        messages: list[ToScheduler] = []
        while not messages:
            messages = mailbox.receive(WAIT_MS)
    assert messages == [AbortReq(9)]
    assert mailbox.strays.malformed == len(MALFORMED)
    mailbox.close()


def test_the_async_mailbox_waits_and_takes_all(address: str) -> None:
    async def main() -> None:
        context = zmq.asyncio.Context()
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
        mailbox = AsyncMailbox(context, address, codec.to_scheduler())
        outbox = Outbox(plain, address)
        waiting = asyncio.create_task(mailbox.receive())
        sent = [AbortReq(rid) for rid in range(2000)]
        for message in sent:
            outbox.send(message)
        came: list[ToScheduler] = await waiting
        while len(came) < len(sent):
            came += await mailbox.receive()
        assert came == sent
        outbox.close()
        mailbox.close()
        context.destroy(linger=0)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_the_async_mailbox_survives_malformed_frames(address: str) -> None:
    async def main() -> None:
        context = zmq.asyncio.Context()
        mailbox = AsyncMailbox(context, address, codec.to_scheduler())
        push = context.socket(zmq.PUSH)
        push.connect(address)
        for frames in MALFORMED:
            await push.send_multipart(frames)
        await push.send(codec.encode(AbortReq(9)))
        came: list[ToScheduler] = []
        while not came:
            came = await mailbox.receive()
        assert came == [AbortReq(9)]
        push.close()
        mailbox.close()
        context.destroy(linger=0)

    asyncio.run(asyncio.wait_for(main(), 20))


def test_the_limit_of_an_ipc_path() -> None:
    check_ipc_path("ipc://" + "x" * IPC_PATH_LIMIT)
    with pytest.raises(AddressTooLong, match=f"has {IPC_PATH_LIMIT + 1} bytes.*TMPDIR"):
        check_ipc_path("ipc://" + "x" * (IPC_PATH_LIMIT + 1))
    with pytest.raises(AddressTooLong):
        check_ipc_path("ipc://" + "é" * 54)


def test_both_ends_check_the_path(context: "zmq.Context[zmq.Socket[bytes]]") -> None:
    address = "ipc:///" + "x" * IPC_PATH_LIMIT
    with pytest.raises(AddressTooLong):
        Outbox(context, address)
    with pytest.raises(AddressTooLong):
        Mailbox(context, address, codec.to_scheduler())
    with pytest.raises(AddressTooLong):
        AsyncMailbox(zmq.asyncio.Context.shadow(context.underlying), address, codec.to_scheduler())


def test_mailbox_that_cannot_be_made_says_where_and_why(
    context: "zmq.Context[zmq.Socket[bytes]]", tmp_path: Path
) -> None:
    address = f"ipc://{tmp_path}/missing/box.sock"
    with pytest.raises(CannotBind) as refused:
        Mailbox(context, address, codec.to_scheduler())
    assert str(refused.value) == f"cannot make the socket {address}: No such file or directory"
