"""The access log: a line for each request, without secrets, and none unless asked for."""

import logging
import re
import socket

import pytest
from front.echo_door import Door, Served

from tokenloom.tokenizer_proc.doors import access_log, http
from tokenloom.wire.door_config import DoorConfig


def test_the_line() -> None:
    line = access_log.line("POST", b"/v1/chat/completions", 200, 1234, 0.05)
    assert line == '"POST /v1/chat/completions" 200 1234 bytes 0.050 s'
    assert access_log.line("GET", b"/", 0, 0, 0.0) == '"GET /" - 0 bytes 0.000 s'


def test_what_the_client_chose_is_escaped_and_cut() -> None:
    line = access_log.line("GET", b'/\n\x1b[31m"\\\xe9\x7f', 404, 1, 0.0)
    assert line.startswith(r'"GET /\x0a\x1b[31m\x22\x5c\x5cxe9\x7f" 404')
    assert len(access_log.line("GET", b"/" + b"\n" * 20000, 404, 1, 0.0)) < 300


def lines_of(served: Served, caplog: pytest.LogCaptureFixture, *requests: bytes) -> list[str]:
    with caplog.at_level(logging.INFO, "tokenloom.tokenizer_proc.doors.connection"):
        for request in requests:
            with socket.create_connection(served.address, timeout=20) as client:
                client.sendall(request)
                while client.recv(1 << 16):
                    pass
        served.stop()
    return [re.sub(r" [0-9.]+ s$", "", record.message) for record in caplog.records]


REQUESTS = (
    b"GET /health?key=secret HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    b"Authorization: Bearer secret\r\n\r\n",
    b"GET /nowhere%0a HTTP/1.0\r\n\r\n",
    b"\0\r\n\r\n",
)


def test_every_request_has_its_line(caplog: pytest.LogCaptureFixture) -> None:
    lines = lines_of(Served(DoorConfig(access_log=True)), caplog, *REQUESTS)
    assert [re.sub(r"\d+ bytes", "N bytes", line) for line in lines] == [
        '"GET /health" 200 N bytes',
        '"GET /nowhere%0a" 404 N bytes',
        '"- -" 400 N bytes',
    ]


def test_it_is_off_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    assert lines_of(Served(), caplog, *REQUESTS) == []


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/chat/completions", "POST /v1/chat/completions"),
        ("/v1/v1/completions", "POST /v1/completions"),
        ("/v1/chat/completion", "POST /v1/chat/completions"),
        ("/healthz", "GET /health"),
        ("/flush-cache", "POST /flush_cache"),
        ("/v1/model", "GET /v1/models"),
        ("/", None),
        ("/metrics", None),
        ("/" + "x" * 20000, None),
    ],
)
def test_the_nearest_route_is_named(door: Door, path: str, near: str | None) -> None:
    assert http.nearest_route(path) == near
    error = door.call("GET", path).error()
    assert error["code"] == "not_found"
    assert len(error["message"]) < 400
    if near is not None:
        assert error["message"].endswith(f"; the nearest is {near}")
