"""Odd HTTP and requests of web pages: each gets its documented status, in the shape of an error."""

import json

import httpx
import pytest
from attack.witness import assert_error_shape, connect, is_healthy, post_head, raw_answer, unharmed
from support.server import Server

pytestmark = pytest.mark.attack

BODY = b'{"text":"hi","sampling_params":{"max_new_tokens":1}}'
CHUNKS = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
LENGTH = f"Content-Length: {len(BODY)}"
CHUNKED = "Transfer-Encoding: chunked"
HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


def post(*lines: str, body: bytes = BODY, version: str = "1.1") -> bytes:
    return post_head("/generate", *lines, version=version) + body


def get(target: str, *lines: str) -> bytes:
    head = [f"GET {target} HTTP/1.1", "Host: 127.0.0.1", *lines, "", ""]
    return "\r\n".join(head).encode("latin-1")


REQUESTS: dict[str, tuple[int, bytes]] = {
    "length and chunks": (400, post(LENGTH, CHUNKED, body=CHUNKS + HIDDEN)),
    "chunks and length": (400, post(CHUNKED, "Content-Length: 4", body=CHUNKS + HIDDEN)),
    "lengths that differ": (400, post(LENGTH, "Content-Length: 3")),
    "the same length twice": (400, post(LENGTH, LENGTH)),
    **{
        f"length {value}": (400, post(f"Content-Length: {value}"))
        for value in ("+5", "-1", "0x10", "5, 5", "", "9" * 30)
    },
    "a length of 2**64 - 1": (413, post(f"Content-Length: {2**64 - 1}")),
    "a length that is folded": (400, post("Content-Length:", f" {len(BODY)}")),
    **{
        f"coding {value!r}": (400, post(f"Transfer-Encoding: {value}", body=CHUNKS))
        for value in ("xchunked", "gzip, chunked", "identity, chunked", "chunked, identity")
    },
    "a vertical tab before the coding": (400, post("Transfer-Encoding: \vchunked", body=CHUNKS)),
    "a space before the colon": (400, post("Transfer-Encoding : chunked", body=CHUNKS)),
    "two codings": (400, post(CHUNKED, "Transfer-Encoding: identity", body=CHUNKS)),
    "chunks in HTTP/1.0": (400, post(CHUNKED, body=CHUNKS, version="1.0")),
    "a chunk of 16**17 bytes": (400, post(CHUNKED, body=b"f" * 17 + b"\r\nx")),
    "a chunk of -1 bytes": (400, post(CHUNKED, body=b"-1\r\nx")),
    "a chunk that is too long": (400, post(CHUNKED, body=b"2\r\nhello\r\n0\r\n\r\n")),
    "chunks without carriage returns": (400, post(CHUNKED, body=b"5\nhello\n0\n\n")),
    "a chunk extension": (431, post(CHUNKED, body=b"5;" + b"a" * 100_000)),
    "trailers": (200, post(CHUNKED, body=CHUNKS[:-2] + b"X-Host: evil\r\n\r\n")),
    "many trailers": (431, post(CHUNKED, body=CHUNKS[:-2] + b"X-T: aaaaaaaaa\r\n" * 6000)),
    "no carriage returns": (400, b"GET /health HTTP/1.1\nHost: 127.0.0.1\n\n"),
    "a carriage return in a value": (400, get("/health", "X-A: a\rX-B: b")),
    "a zero byte in a value": (400, get("/health", "X-A: a\0b")),
    "a value that is folded": (400, get("/health", "X-A: a", " b")),
    "a line without a colon": (400, get("/health", "garbage")),
    "a header without a name": (400, get("/health", ": b")),
    "no Host": (400, b"GET /health HTTP/1.1\r\n\r\n"),
    "two Hosts": (400, get("/health", "Host: 127.0.0.1")),
    "HTTP/0.9": (400, b"GET /health\r\n\r\n"),
    "HTTP/2": (400, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    "HTTP/9.9": (400, b"GET /health HTTP/9.9\r\nHost: 127.0.0.1\r\n\r\n"),
    "TLS": (400, b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + bytes(160)),
    "all bytes": (400, bytes(range(256)) * 40),
    "a long method": (400, b"G" * 60_000 + b" / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
    "a long target": (404, get("/" + "a" * 20_000)),
    "a target of 5 MB": (431, get("/" + "a" * 5_000_000)),
    "a header of 5 MB": (431, get("/health", "X-A: " + "a" * 5_000_000)),
    "101 headers": (431, get("/health", *(f"X-{n}: a" for n in range(101)))),
    "a body of 5 MB": (413, post("Content-Length: 5000000", body=bytes(5_000_000))),
    "chunks of 5 MB": (413, post(CHUNKED, body=(b"10000\r\n" + bytes(65536) + b"\r\n") * 80)),
    "a compressed body": (415, post(LENGTH, "Content-Encoding: gzip")),
    "no body": (400, post("Content-Length: 0", body=b"")),
    "a file above the root": (404, get("/../../etc/passwd")),
    "the same, escaped": (404, get("/%2e%2e/%2e%2e/etc/passwd")),
    "a model above the root": (404, get("/v1/models/../../etc/passwd")),
    "line breaks in a model's name": (404, get("/v1/models/%0d%0aSet-Cookie:%20a")),
    "half a surrogate pair": (404, get("/v1/models/%ed%a0%80")),
    "a proxy's CONNECT": (405, b"CONNECT 127.0.0.1:22 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
    "TRACE": (405, b"TRACE /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
    "a wish for HTTP/2": (
        200,
        post(LENGTH, "Connection: Upgrade, HTTP2-Settings", "Upgrade: h2c", "HTTP2-Settings: AA"),
    ),
    "a wish for a websocket": (200, post(LENGTH, "Connection: Upgrade", "Upgrade: websocket")),
}


def test_odd_requests(server: Server) -> None:
    with unharmed(server):
        got = {}
        for name, (_, request) in REQUESTS.items():
            status, answer = raw_answer(server, request)
            got[name] = status
            assert answer.count(b"\r\ncontent-length:") == 1, f"{name}: more than one answer"
            if status != 200:
                assert_error_shape(answer)
            assert b"Set-Cookie:" not in answer.partition(b"\r\n\r\n")[0]
        assert got == {name: status for name, (status, _) in REQUESTS.items()}


def test_thousands_of_requests_in_one_packet(server: Server) -> None:
    with unharmed(server), connect(server) as plain:
        plain.sendall(get("/health") * 2000 + get("/health", "Connection: close"))
        got = b""
        while part := plain.recv(1 << 16):
            got += part
        assert got.count(b"HTTP/1.1 200 ") == 2001


def test_nothing_is_written_into_a_stream(server: Server) -> None:
    """Half a head behind a request whose answer streams for longer than a head may take."""
    sampling = {"max_new_tokens": 3000, "ignore_eos": True}
    body = json.dumps({"text": "hi", "stream": True, "sampling_params": sampling}).encode()
    with unharmed(server), connect(server) as plain:
        plain.sendall(post(f"Content-Length: {len(body)}", body=body) + b"GET /health HT")
        got = b""
        while b"[DONE]" not in got[-200:] and (part := plain.recv(1 << 16)):
            got += part
        assert b"data: [DONE]\n\n" in got
        assert got.count(b"HTTP/1.1 ") == 1


EVIL = {"Origin": "https://evil.example"}
JSON = {"Content-Type": "application/json"}
FORMS = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a")
ROUTES = ("/generate", "/v1/chat/completions", "/flush_cache", "/load_lora_adapter")


@pytest.mark.parametrize("route", ROUTES)
def test_a_web_page_changes_and_reads_nothing(server: Server, route: str) -> None:
    """Requests that a browser sends without asking its user or the server first."""
    tries = [("GET", EVIL, {404, 405, 403}), ("OPTIONS", EVIL, {403})]
    for headers in (EVIL, {"Sec-Fetch-Site": "cross-site"}, {"Origin": "null"}):
        tries += [("POST", headers | JSON, {403}), ("POST", headers, {403})]
    tries += [("POST", {"Host": f"evil.example:{server.port}"} | JSON, {403})]
    tries += [("POST", {"Content-Type": form}, {415}) for form in FORMS]
    before = server.stats()["prompt_tokens_total"]
    with httpx.Client(base_url=server.url, timeout=30) as client:
        for method, headers, statuses in tries:
            answer = client.request(method, route, headers=headers, content=BODY)
            assert answer.status_code in statuses, (method, headers)
            assert not [name for name in answer.headers if name.startswith("access-control")]
        assert client.get("/flush_cache").status_code == 405
        assert client.get("/get_server_info", headers={"Host": "evil.example"}).status_code == 403
    assert server.stats()["prompt_tokens_total"] == before
    assert is_healthy(server)
