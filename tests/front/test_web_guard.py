"""Requests that a web page makes a browser send are refused, those of programs are served."""

import pytest
from front.echo_door import Door

from tokenloom.tokenizer_proc.doors.errors import ApiError
from tokenloom.tokenizer_proc.doors.web_guard import WebGuard

JSON = {"Content-Type": "application/json"}
STATE = ("/generate", "/v1/chat/completions", "/flush_cache", "/load_lora_adapter")


def status_of(
    headers: dict[str, str],
    method: str = "GET",
    server: str | None = "127.0.0.1",
    allowed: tuple[str, ...] = (),
    own: str = "127.0.0.1",
) -> int:
    """200, or what the guard refuses with."""
    scope = {
        "method": method,
        "server": None if server is None else (server, 30000),
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
    }
    try:
        WebGuard(allowed, own).check(scope)
    except ApiError as error:
        return error.status
    return 200


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.0.0.1:30000", "localhost:30000", "LOCALHOST", "127.8.8.8", "[::1]:30000",
     "[::ffff:127.0.0.1]", "localhost.:1"],
)  # fmt: skip
@pytest.mark.parametrize("server", ["127.0.0.1", "::1", "10.0.0.5", None])
def test_loopback_is_a_good_host(host: str, server: str | None) -> None:
    assert status_of({"Host": host}, server=server) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:30000", "127.0.0.1.evil.example", "10.0.0.5", "localhos"]
)
@pytest.mark.parametrize("server", ["127.0.0.1", "::1", "::ffff:127.0.0.1", None])
def test_other_names_of_loopback_are_refused(host: str, server: str | None) -> None:
    assert status_of({"Host": host}, server=server) == 403


def test_names_that_are_allowed() -> None:
    allowed = ("models.example", "10.0.0.5", "fd00::5")
    for host in ("Models.Example", "models.example.:443", "10.0.0.5:30000", "[fd00::5]:1"):
        assert status_of({"Host": host}, allowed=allowed) == 200
    assert status_of({"Host": "example"}, allowed=allowed) == 403
    assert status_of({"Host": "any.example"}, allowed=("*",)) == 200
    assert status_of({"Host": "Box:1"}, own="box") == 200
    assert status_of({"Host": "box.evil.example"}, own="box") == 403


def test_a_network_address() -> None:
    """Any name will do, unless names were given; the address itself always will."""
    assert status_of({"Host": "box.lan"}, server="10.0.0.5", own="10.0.0.5") == 200
    assert status_of({"Host": "box.lan"}, server="10.0.0.5") == 200
    assert status_of({"Host": "box.lan"}, server="10.0.0.5", allowed=("models.example",)) == 403
    assert status_of({"Host": "10.0.0.5:1"}, server="10.0.0.5", allowed=("models.example",)) == 200


@pytest.mark.parametrize("host", ["a b", "a:b", "a:1:2", "[::1", "a/b", "a@b", "é", ":1"])
def test_a_host_that_is_none(host: str) -> None:
    assert status_of({"Host": host}, allowed=("*",)) == 400


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "OPTIONS"])
def test_pages(method: str) -> None:
    host = {"Host": "127.0.0.1:30000"}
    for origin in ("https://evil.example", "null", "", "http://127.0.0.1:3000", "file://"):
        assert status_of(host | {"Origin": origin}, method) == 403
    assert status_of(host | {"Origin": "http://127.0.0.1:30000"}, method) == 200
    assert status_of({"Origin": "http://127.0.0.1:30000"}, method) == 403
    assert status_of(host | {"Sec-Fetch-Site": "cross-site"}, method) == 403
    for site in ("same-origin", "none"):
        assert status_of(host | {"Sec-Fetch-Site": site}, method) == 200


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        (None, 200),
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/problem+json", 200),
        ("text/plain", 415),
        ("text/plain; application/json", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=a", 415),
        ("application/jsonx", 415),
        ("", 415),
    ],
)
def test_content_types(content_type: str | None, status: int) -> None:
    given = {} if content_type is None else {"Content-Type": content_type}
    assert status_of(given, "POST") == status_of(given, "PUT") == status
    assert status_of(given, "GET") == 200


@pytest.mark.parametrize("path", STATE)
def test_nothing_happens(door: Door, path: str) -> None:
    page = {"Host": "127.0.0.1:1", "Origin": "https://evil.example"}
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    for headers, status, code in [
        (page, 403, "forbidden"),
        (page | JSON, 403, "forbidden"),
        ({"Host": "evil.example"} | JSON, 403, "forbidden"),
        (form, 415, "unsupported_media_type"),
    ]:
        answer = door.call("POST", path, {"text": "a", "lora_name": "x"}, headers)
        assert (answer.status, answer.error()["code"]) == (status, code)
        assert not [name for name in answer.headers if name.startswith("access-control")]
    assert "curl: -H" in answer.error()["message"]
    assert door.scheduler.sent == []
    assert door.call("POST", "/generate", {"text": "a"}, JSON | {"Host": "localhost"}).status == 200


def test_a_long_value_is_not_repeated_whole(door: Door) -> None:
    for headers in ({"Origin": "x" * 20000}, {"Content-Type": "x" * 20000}, {"Host": "x" * 20000}):
        answer = door.call("POST", "/generate", {"text": "a"}, headers)
        assert answer.status in (403, 415)
        assert len(answer.body) < 1000
