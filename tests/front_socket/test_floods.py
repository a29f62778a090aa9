"""Clients that flood the door and leave: neither its process ends, nor its memory grows with them.

The door runs in a process of its own, where an abort would be seen as its exit status.
"""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq
from zmtp_client import connect, greeted, send_until_stuck

from tokenloom.tokenizer_proc.doors import zmtp
from tokenloom.wire import codec
from tokenloom.wire.client_messages import Pong

LEAVES = 50
FLOOD_BYTES = 3 << 20
GROWTH_KIB = 100 << 10

PING = b'{"type":"ping","seq":1}'
FLOODS = {
    "pings of the door and of ZMTP": (zmtp.message([PING]) * 20 + zmtp.PING) * 50,
    "malformed frames": zmtp.message([b'{"type":"ping","seq":"aaaa"}']) * 500,
    "big frames": zmtp.message([b'{"type":"generate","input_ids":[' + b"1," * (1 << 19)]),
    "requests": zmtp.message([b'{"type":"generate","rid":"r","text":"x"}']) * 500,
    "a message without an end": zmtp.frame(b"x" * (1 << 18), more=True),
    "many frames of one message": zmtp.frame(b"", more=True) * 2000,
    "one byte of a frame, then nothing": b"\x00",
}


class DoorProcess:
    def __init__(self, addresses: list[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "door_process.py"), *addresses],
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"up\n"

    def peak_kib(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        peak = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert peak is not None
        return int(peak[1])


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    with zmq.Context() as context, context.socket(zmq.PULL) as probe:
        port = probe.bind_to_random_port("tcp://127.0.0.1")
    return [f"ipc://{tmp_path_factory.mktemp('door')}/door.sock", f"tcp://127.0.0.1:{port}"]


@pytest.fixture(scope="module")
def door(addresses: list[str]) -> Iterator[DoorProcess]:
    door = DoorProcess(addresses)
    try:
        yield door
        door.process.send_signal(signal.SIGTERM)
        assert door.process.wait(20) == 0
    finally:
        door.process.kill()
        door.process.wait()
        assert door.process.stdout is not None
        door.process.stdout.close()


def assert_answers(address: str) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.setsockopt(zmq.RCVTIMEO, 10_000)
        dealer.connect(address)
        dealer.send(PING)
        assert isinstance(codec.decode_to_client(dealer.recv()), Pong)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, 1], ids=["ipc", "tcp"])
def test_clients_that_flood_and_leave(door: DoorProcess, addresses: list[str], which: int) -> None:
    address = addresses[which]
    before = door.peak_kib()
    kinds = list(FLOODS.values())
    for turn in range(LEAVES):
        flood = kinds[turn % len(kinds)]
        with greeted(address) as plain:
            send_until_stuck(plain, flood, FLOOD_BYTES if len(flood) > 1 else 1)
    assert_answers(address)
    assert door.process.poll() is None
    assert door.peak_kib() - before < GROWTH_KIB


@pytest.mark.slow
def test_many_that_hold_half_a_message_are_bounded(door: DoorProcess, addresses: list[str]) -> None:
    before = door.peak_kib()
    held = [greeted(addresses[0]) for _ in range(100)]
    for plain in held:
        plain.settimeout(10)
        head = b"\x02" + (3 << 20).to_bytes(8)
        try:
            plain.sendall(head + bytes(2 << 20))
        except ConnectionError:
            continue  # its room was given to another
    assert_answers(addresses[0])
    assert door.peak_kib() - before < 2 * GROWTH_KIB
    for plain in held:
        plain.close()


@pytest.mark.slow
def test_more_connections_than_the_door_holds(door: DoorProcess, addresses: list[str]) -> None:
    """Who says nothing makes room for who does."""
    silent = [connect(addresses[1]) for _ in range(600)]
    assert_answers(addresses[1])
    assert len(list(Path(f"/proc/{door.process.pid}/fd").iterdir())) < 600
    for plain in silent:
        plain.close()
    assert_answers(addresses[1])
