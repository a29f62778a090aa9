"""Real connections: bounded in number and in time, answered in order, in the shape of all errors.

The deadlines themselves are tested on a fake clock (test_phases.py), and who gives way when the
table is full in test_connection_table.py.
"""

import asyncio
import http.client
import json
import socket
from collections.abc import Iterator
from types import MappingProxyType

import msgspec
import pytest
from front.echo_door import Served, submitted

from tokenloom.tokenizer_proc.doors.phases import RULES, Phase, Rules
from tokenloom.tokenizer_proc.limits import MAX_HEADER_BYTES
from tokenloom.wire.door_config import DoorConfig

HEAD = b"Host: 127.0.0.1\r\n"
HEALTH = b"GET /health HTTP/1.1\r\n" + HEAD + b"\r\n"
READY = b'{"status":"ready"}'


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.stop()


@pytest.fixture(scope="module")
def hasty() -> Iterator[Served]:
    """A server that waits for nothing longer than a moment."""
    served = Served(rules=soon(*RULES))
    yield served
    served.stop()


def soon(*phases: Phase) -> Rules:
    """The rules, with hardly any time for some phases."""
    quick = {
        phase: msgspec.structs.replace(rule, seconds=0.05, bytes_per_second=None)
        for phase, rule in RULES.items()
        if phase in phases
    }
    return MappingProxyType({**RULES, **quick})


def connect(served: Served) -> socket.socket:
    return socket.create_connection(served.address, timeout=20)


def rest_of(client: socket.socket) -> bytes:
    """Everything the server says until it closes the connection."""
    received = b""
    while data := client.recv(1 << 16):
        received += data
    return received


def answer_to(served: Served, *pieces: bytes) -> bytes:
    with connect(served) as client:
        for piece in pieces:
            client.sendall(piece)
        return rest_of(client)


def read_answer(client: socket.socket) -> bytes:
    """One answer with a Content-Length, head and body."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += client.recv(1)
    length = int(received.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
    while length > 0:
        data = client.recv(length)
        assert data, received
        received += data
        length -= len(data)
    return received


def post(body: bytes, *headers: bytes, version: bytes = b"1.1") -> bytes:
    lines = b"".join(header + b"\r\n" for header in headers)
    return (
        b"POST /generate HTTP/%s\r\n%sContent-Type: application/json\r\n%s"
        b"Content-Length: %d\r\n\r\n%s"
    ) % (version, HEAD, lines, len(body), body)


def stream_of(length: int) -> bytes:
    return json.dumps({"text": "a" * length, "stream": True}).encode()


def error_of(answer: bytes) -> dict[str, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    assert b"connection: close" in head
    (error,) = json.loads(body).values()
    assert list(error) == ["message", "type", "param", "code"]
    return error


# What is no good request


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
        b"GET /health HTTP/1.0\r\nHost: a\r\nHost: a\r\n\r\n",
        b"GET /health HTTP/2.0\r\n" + HEAD + b"\r\n",
        b"GET /health HTTP/9.9\r\n" + HEAD + b"\r\n",
        b"GET /health\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /h\xe9alth HTTP/1.1\r\n" + HEAD + b"\r\n",
        b"FOO /health HTTP/1.1\r\n" + HEAD + b"\r\n",
        b"\x16\x03\x01\x00\xa5" + b"\0" * 60,
        post(b"{}", b"Content-Length: 2"),
        post(b"{}", b"Content-Length: 3"),
        post(b"{}", b"Transfer-Encoding: chunked"),
        post(b"{}").replace(b"Content-Length: 2", b"Content-Length: +2"),
        post(b"{}").replace(b"Content-Length: 2", b"Content-Length: 2, 2"),
        *(
            post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: " + coding)
            + b"2\r\n{}\r\n0\r\n\r\n"
            for coding in (b"gzip, chunked", b"identity, chunked", b"xchunked", b"gzip")
        ),
        post(b"", version=b"1.0").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
        + b"2\r\n{}\r\n0\r\n\r\n",
        post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"zz\r\n{}\r\n",
    ],
)
def test_malformed(served: Served, request_bytes: bytes) -> None:
    answer = answer_to(served, request_bytes)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 400 ") == 1
    error = error_of(answer)
    assert error["type"] == "invalid_request_error"
    assert error["message"]


def test_a_header_without_end(served: Served) -> None:
    start = b"GET /health HTTP/1.1\r\nx-a: "
    answer = answer_to(served, start, b"a" * (MAX_HEADER_BYTES + 1024))
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert error_of(answer)["code"] == "headers_too_large"


def test_a_target_without_end(served: Served) -> None:
    answer = answer_to(served, b"GET /" + b"a" * (MAX_HEADER_BYTES + 1024))
    assert answer.startswith(b"HTTP/1.1 431 ")


@pytest.mark.parametrize("framing", [b"2;" + b"a" * 1000, b"0\r\nX-T: " + b"a" * 1000])
def test_framing_of_a_body_without_end(served: Served, framing: bytes) -> None:
    head = post(b"").replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    answer = answer_to(served, head + framing + b"a" * (MAX_HEADER_BYTES + 1024))
    assert answer.startswith(b"HTTP/1.1 431 ")


def test_many_headers_in_one_packet_meet_the_application_limit(served: Served) -> None:
    head = b"".join(b"x-%d: v\r\n" % index for index in range(200))
    answer = answer_to(served, HEALTH[:-2] + b"Connection: close\r\n" + head + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 431")


def test_connect_is_refused(served: Served) -> None:
    answer = answer_to(served, b"CONNECT 127.0.0.1:22 HTTP/1.1\r\n" + HEAD + b"\r\n")
    assert error_of(answer)["code"] == "method_not_allowed"


# What is


@pytest.mark.parametrize("upgrade", [b"h2c", b"websocket"])
def test_a_wish_for_another_protocol_is_passed_over(served: Served, upgrade: bytes) -> None:
    wishes = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: " + upgrade, b"HTTP2-Settings: AA")
    request = post(b'{"text": "abc"}', *wishes)
    with connect(served) as client:
        for cut in (len(request), 40, len(request) - 5):  # whole, within the head, in the body
            client.sendall(request[:cut])
            client.sendall(request[cut:])
            answer = read_answer(client)
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b'"text":"abc"' in answer
        client.sendall(request + HEALTH)
        assert b'"text":"abc"' in read_answer(client)
        assert read_answer(client).endswith(READY)


def test_an_absolute_target_says_the_host(served: Served) -> None:
    good = b"GET http://localhost:1/health HTTP/1.1\r\nHost: evil.example\r\n\r\n"
    evil = b"GET http://evil.example/health HTTP/1.1\r\n" + HEAD + b"\r\n"
    with connect(served) as client:
        client.sendall(good)
        assert read_answer(client).endswith(READY)
        client.sendall(evil)
        assert read_answer(client).startswith(b"HTTP/1.1 403 ")


def test_trailers_are_no_headers(served: Served) -> None:
    body = b'{"text": "abc"}'
    request = post(b"").replace(
        b"Content-Length: 0", b"Transfer-Encoding: chunked"
    ) + b"%x\r\n%s\r\n0\r\nX-Request-Id: late\r\n\r\n" % (len(body), body)
    with connect(served) as client:
        for at in range(len(request)):
            client.sendall(request[at : at + 1])
        answer = read_answer(client)
        assert b'"text":"abc"' in answer
        assert b"x-request-id" not in answer
        client.sendall(HEALTH)
        assert read_answer(client).endswith(READY)


def test_the_body_is_asked_for(served: Served) -> None:
    body = b'{"text": "abc"}'
    head = post(body, b"Expect: 100-continue").removesuffix(body)
    with connect(served) as client:
        client.sendall(head)
        assert client.recv(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(body)
        assert b'"text":"abc"' in read_answer(client)


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_gets_a_plain_body(served: Served, stream: bool) -> None:
    body = json.dumps({"text": "abc", "stream": stream}).encode()
    answer = answer_to(served, post(body, b"Connection: keep-alive", version=b"1.0"))
    head, _, rest = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    if stream:
        assert rest.startswith(b"data: {")
        assert rest.endswith(b"data: [DONE]\n\n")
    else:
        assert json.loads(rest)["text"] == "abc"


def test_http_1_0_needs_no_host(served: Served) -> None:
    assert answer_to(served, b"GET /health HTTP/1.0\r\n\r\n").endswith(READY)


def test_a_request_may_be_the_last(served: Served) -> None:
    """What stands behind it is not looked at, good or bad."""
    last = HEALTH[:-2] + b"Connection: close\r\n\r\n"
    for behind in (b"", HEALTH, b"\0\0\0", b"GET /hea"):
        answer = answer_to(served, last + behind)
        assert answer.count(b"HTTP/1.1 ") == 1
        assert answer.endswith(READY)


def test_a_body_and_half_of_the_next_head_in_one_packet(served: Served) -> None:
    body = json.dumps({"text": "a", "pad": "x" * 60_000}).encode()
    with connect(served) as client:
        client.sendall(post(body) + HEALTH[:7])
        assert b'"text":"a"' in read_answer(client)
        client.sendall(HEALTH[7:])
        assert read_answer(client).endswith(READY)


def test_requests_ahead_of_their_answers(served: Served) -> None:
    count = 3000
    with connect(served) as client:
        client.sendall(HEALTH * count + HEALTH[:-2] + b"Connection: close\r\n\r\n")
        answers = rest_of(client)
    assert answers.count(b"HTTP/1.1 200 ") == answers.count(READY) == count + 1


@pytest.mark.parametrize("behind", [b"GET /health HT", b"\0\0", b"GET / HTTP/1.1\r\n\r\n"])
def test_nothing_is_written_into_an_answer(hasty: Served, behind: bytes) -> None:
    """Half a head, or garbage, behind a stream is refused after the stream."""
    answer = answer_to(hasty, post(stream_of(50)) + behind)
    stream, _, refusal = answer.partition(b"0\r\n\r\nHTTP/1.1 ")
    assert stream.endswith(b"data: [DONE]\n\n\r\n")
    assert stream.count(b"HTTP/1.1 ") == 1
    assert refusal[:3] == (b"408" if behind.startswith(b"GET /health") else b"400")


def test_an_answer_before_the_body_ends_the_connection(served: Served) -> None:
    """The rest of the body is not read as a request, and does not cost the client the answer."""
    body = b"x" * (8 << 20)
    with connect(served) as client:
        client.sendall(post(body)[: -len(body)])
        answer = read_answer(client)
        assert answer.startswith(b"HTTP/1.1 413 ")
        assert error_of(answer)["code"] == "request_too_large"
        client.sendall(HEALTH)
        assert rest_of(client) == b""


# What takes too long


def test_a_connection_that_says_nothing(hasty: Served) -> None:
    assert answer_to(hasty) == b""


def test_line_breaks_are_no_request() -> None:
    served = Served(rules=soon(Phase.FRESH, Phase.IDLE))
    with connect(served) as client:
        client.sendall(b"\r\n" * 50)
        assert rest_of(client) == b""
    with connect(served) as client:
        client.sendall(HEALTH)
        read_answer(client)
        client.sendall(b"\r\n")
        assert rest_of(client) == b""
    served.stop()


def test_a_head_that_stops_half_way(hasty: Served) -> None:
    answer = answer_to(hasty, b"GET /health HTTP/1.1\r\nx-a")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert "headers" in error_of(answer)["message"]


@pytest.mark.parametrize("framing", [b"Content-Length: 100", b"Transfer-Encoding: chunked"])
def test_a_body_that_stops_half_way(hasty: Served, framing: bytes) -> None:
    answer = answer_to(hasty, post(b"").replace(b"Content-Length: 0", framing) + b"1\r\n{\r\n")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert "body" in error_of(answer)["message"]
    assert hasty.door.front.in_flight == 0


@pytest.mark.slow
def test_a_client_that_does_not_read() -> None:
    served = Served(rules=soon(Phase.BLOCKED), doors=DoorConfig(max_body_bytes=1 << 20))
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.settimeout(20)
        client.connect(served.address)
        with pytest.raises(ConnectionError):
            client.sendall(HEALTH * 1_000_000)
    served.stop()


def test_large_bodies_and_idle_connections_are_no_heads() -> None:
    served = Served(rules=soon(Phase.HEAD))
    client = http.client.HTTPConnection(*served.address, timeout=20)
    body = b'{"text": "a", "pad": "' + b"x" * (1 << 20) + b'"}'
    for _ in range(2):
        client.request("POST", "/generate", body)
        answer = client.getresponse()
        assert (answer.status, b'"text":"a"' in answer.read()) == (200, True)
    client.close()
    served.stop()


# What is too much


def test_connections_that_wait_make_room() -> None:
    """Silent ones, idle ones and those within a head give way; health probes get in."""
    served = Served(DoorConfig(max_connections=8))
    crowd = [connect(served) for _ in range(30)]
    for index, client in enumerate(crowd):
        client.sendall((b"", b"\r\n", b"GET /hea")[index % 3])
    for _ in range(20):
        with connect(served) as probe:
            probe.sendall(HEALTH)
            assert read_answer(probe).endswith(READY)
    for client in crowd:
        client.close()
    served.stop()


def test_connections_with_requests_stay() -> None:
    """When all have one, the next connection is told so at once; later there is room again."""
    served = Served(DoorConfig(max_connections=2))
    served.door.scheduler.hold = True
    held = [connect(served) for _ in range(2)]
    for client in held:
        client.sendall(post(b'{"text": "a"}'))
    asyncio.run_coroutine_threadsafe(submitted(served.door, 2), served.loop).result(20)
    for _ in range(3):
        answer = answer_to(served)
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in head
        assert b"2 connections have requests" in body
    held[0].close()  # the server sees that a moment later
    tries = (answer_to(served, HEALTH[:-2] + b"Connection: close\r\n\r\n") for _ in range(1000))
    assert any(answer.startswith(b"HTTP/1.1 200 ") for answer in tries)
    held[1].close()
    served.stop()
