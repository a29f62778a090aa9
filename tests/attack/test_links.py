"""Garbage and well-typed nonsense in the mailboxes of a running server: dropped, counted, outlived.

Nobody but the same user can write there, whom nothing keeps out; what an older or newer process of
the server itself might say by mistake looks the same.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq
from attack.witness import unharmed
from procs.test_strays import strange_to
from support.server import Server

from tokenloom.wire import codec, messages
from tokenloom.wire.config import Links

pytestmark = pytest.mark.attack

GARBAGE = 20_000
LOG_BYTES = 200_000
FOREIGN = 1 << 40
# Messages by their receivers; an order to drain or a word about a death would rightly be believed.
BOXES = {
    "scheduler": messages.ToScheduler,
    "detokenizer": messages.ToDetokenizer,
    "front": messages.ToFront,
    "launcher": messages.ToLauncher,
}


@contextmanager
def mailbox(server: Server, name: str) -> Iterator["zmq.Socket[bytes]"]:
    """The place of a sender; leaving it waits until all was sent."""
    (run_dir,) = server.run_dirs()
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(getattr(Links(str(run_dir)), name))
        yield socket


def served(server: Server) -> bool:
    return bool(server.generate("hi", max_new_tokens=2)["output_ids"])


@pytest.mark.parametrize("name", BOXES)
def test_garbage(server: Server, name: str) -> None:
    chance = random.Random(name)
    logged = len(server.log)
    with unharmed(server, nonsense=True) as witness:
        with mailbox(server, name) as socket:
            for _ in range(GARBAGE):
                socket.send(chance.randbytes(chance.randrange(60)))
            for frame in (b"", b"\xc1", b"\x91" * 200_000, b"\xdd\xff\xff\xff\xff"):
                socket.send(frame)
            socket.send_multipart([b"a", b"b"])
        assert served(server)
        witness.gets_on()
    assert len(server.log) - logged < LOG_BYTES


@pytest.mark.parametrize("name", BOXES)
def test_well_typed_nonsense(server: Server, name: str) -> None:
    nonsense = [foreign(one) for one in strange_to(BOXES[name]) if not believed(one)]
    assert nonsense
    with unharmed(server, nonsense=True) as witness:
        for message in nonsense:
            with mailbox(server, name) as socket:
                socket.send(codec.encode(message))
            assert served(server), message
        witness.gets_on()


def foreign(message: msgspec.Struct) -> msgspec.Struct:
    """Not under the id of a request that the front may have made."""
    if isinstance(message, messages.TokenizedGenerateReq):
        return msgspec.structs.replace(message, rid=message.rid + FOREIGN)
    return message


def believed(message: msgspec.Struct) -> bool:
    """What cannot be told from a true word, as only its sender could know that it is none."""
    return isinstance(message, messages.ChildDied | messages.LoopStamp)
