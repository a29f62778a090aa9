"""Real connections: bounded in number, their heads in bytes and in time, others unharmed."""

import http.client
import socket
from collections.abc import Iterator

import pytest
from front.echo_door import Served

from tokenloom.tokenizer_proc.doors import connection
from tokenloom.tokenizer_proc.limits import MAX_HEADER_BYTES
from tokenloom.wire.config import DoorConfig


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.stop()


def answer_to(served: Served, *pieces: bytes) -> bytes:
    """Everything the server says until it closes the connection."""
    with socket.create_connection(served.address, timeout=20) as client:
        for piece in pieces:
            client.sendall(piece)
        received = b""
        while data := client.recv(1 << 16):
            received += data
        return received


def test_a_header_without_end(served: Served) -> None:
    start = b"GET /health HTTP/1.1\r\nx-a: "
    answer = answer_to(served, start, b"a" * MAX_HEADER_BYTES)
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'"code":"headers_too_large"' in answer


def test_a_target_without_end(served: Served) -> None:
    answer = answer_to(served, b"GET /" + b"a" * MAX_HEADER_BYTES)
    assert answer.startswith((b"HTTP/1.1 431 ", b"HTTP/1.1 400 "))


def test_a_head_that_stops_half_way(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.05)
    answer = answer_to(served, b"GET /health HTTP/1.1\r\nx-a")
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_large_bodies_and_idle_connections_are_no_heads(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "HEAD_SECONDS", 0.05)
    client = http.client.HTTPConnection(*served.address, timeout=20)
    body = b'{"text": "a", "pad": "' + b"x" * (1 << 20) + b'"}'
    for _ in range(2):
        client.request("POST", "/generate", body)
        answer = client.getresponse()
        assert (answer.status, b'"text":"a"' in answer.read()) == (200, True)
    client.close()


def test_many_headers_in_one_packet_meet_the_application_limit(served: Served) -> None:
    head = b"".join(b"x-%d: v\r\n" % index for index in range(200))
    client = http.client.HTTPConnection(*served.address, timeout=20)
    client.connect()
    client.sock.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n" + head + b"\r\n")
    assert client.sock.recv(12) == b"HTTP/1.1 431"
    client.close()


def test_one_connection_too_many() -> None:
    """It is told so at once; those that are open go on, and when one is closed there is room."""
    served = Served(DoorConfig(max_connections=2))
    open_ones = [http.client.HTTPConnection(*served.address, timeout=20) for _ in range(2)]
    for one in open_ones:
        one.request("GET", "/health")
        assert one.getresponse().read() == b'{"status":"ready"}'
    for _ in range(5):
        answer = answer_to(served)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in head
        assert b"2 connections are open" in body
    for one in open_ones:
        one.request("POST", "/generate", b'{"text": "a"}')
        assert one.getresponse().read().startswith(b'{"text":"a"')
    open_ones[0].close()
    # The server sees the end of the first a moment later.
    tries = (answer_to(served, b"GET /health HTTP/1.0\r\n\r\n") for _ in range(1000))
    assert any(answer.startswith(b"HTTP/1.1 200 ") for answer in tries)
    open_ones[1].close()
    served.stop()


def test_a_connection_that_says_nothing_is_closed() -> None:
    served = Served(keep_alive=0.05)
    assert answer_to(served) == b""
    connection = http.client.HTTPConnection(*served.address, timeout=20)
    connection.request("GET", "/health")
    assert connection.getresponse().read() == b'{"status":"ready"}'
    connection.close()
    served.stop()
