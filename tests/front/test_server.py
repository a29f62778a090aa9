"""The front process as a whole: real sockets, real uvicorn, a fake scheduler and detokenizer.

The fake pair is one thread on the links' real mailboxes; SIGTERM is sent for real.
"""

import asyncio
import contextlib
import http.client
import json
import os
import resource
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
import zmq
from front.echo_door import INFO, ByteEncoder, ByteRenderer

from tokenloom.tokenizer_proc import limits, server
from tokenloom.wire import codec, paths
from tokenloom.wire.channel import Mailbox, Outbox
from tokenloom.wire.config import FrontConfig, Links, ModelConfig
from tokenloom.wire.door_config import DoorConfig
from tokenloom.wire.lora_config import LoRAConfig
from tokenloom.wire.messages import (
    BatchStrOut,
    ChildDied,
    Drained,
    DrainReq,
    Finish,
    LoadLoRAReq,
    LoRALoaded,
    SchedulerReady,
    StrOut,
    ToFront,
    TokenizedGenerateReq,
)


class Life:
    """Stands in for wire.child.ChildLife."""

    def __init__(self) -> None:
        self.url = ""
        self.told = threading.Event()

    def ready(self, detail: str = "") -> None:
        self.url = detail
        self.told.set()


class FakePair(threading.Thread):
    """Scheduler and detokenizer: ready at once, one row of "ok" a request, Drained when asked."""

    def __init__(self, links: Links) -> None:
        super().__init__(daemon=True)
        self._links = links
        self.may_start = threading.Event()
        self.hold = threading.Event()  # set: requests end only with the drain
        self.got_request = threading.Event()

    def run(self) -> None:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        mailbox = Mailbox(context, self._links.scheduler, codec.to_scheduler())
        front = Outbox(context, self._links.front)
        assert self.may_start.wait(20)
        front.send(SchedulerReady(INFO))
        held: list[int] = []
        draining = False
        while not draining:
            for message in mailbox.receive(20_000):
                match message:
                    case TokenizedGenerateReq(rid=rid):
                        held.append(rid)
                        self.got_request.set()
                    case LoadLoRAReq(ref=ref):
                        ok = not ref.path.endswith("bad")
                        front.send(LoRALoaded(ref.lora_id, ok, "" if ok else "it is bad", 400))
                    case DrainReq():
                        draining = True
            if not self.hold.is_set() or draining:
                for rid in held:
                    front.send(BatchStrOut([StrOut(rid, "ok", (1,), Finish("stop", 0))]))
                held.clear()
        front.send(Drained())
        front.close()
        mailbox.close()
        context.term()


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[FrontConfig]:
    directory = tempfile.mkdtemp(prefix="tl-")  # pytest's own are too long for a socket path
    monkeypatch.setenv("XDG_RUNTIME_DIR", directory)
    monkeypatch.setattr(server, "load_text", lambda path: (ByteEncoder(), ByteRenderer()))
    yield FrontConfig(
        model=ModelConfig(model="/models/tiny", served_model_name="tiny"),
        doors=DoorConfig(port=0),
        log_level="info",
        links=Links(directory),
    )
    shutil.rmtree(directory)


def serve_while(
    config: FrontConfig,
    client: Callable[[Life, FakePair], None],
    signum: signal.Signals | None = signal.SIGTERM,
) -> int:
    """Run the server in this thread (signals need the main one) and `client` beside it.

    A client that succeeded ends the server with `signum`; None: it has ended already.
    """
    life, pair = Life(), FakePair(config.links)
    pair.start()
    failures: list[BaseException] = []

    def beside() -> None:
        try:
            client(life, pair)
        except BaseException as error:
            failures.append(error)
        finally:
            pair.may_start.set()
            if signum is not None or failures:
                os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=beside, daemon=True)

    async def main() -> int:
        asyncio.get_running_loop().call_soon(thread.start)
        async with asyncio.timeout(30):
            return await server.serve(config, life)

    status = asyncio.run(main())
    thread.join(20)
    pair.join(20)
    if failures:
        raise failures[0]
    return status


def request(url: str, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_from_loading_to_a_drained_end(config: FrontConfig) -> None:
    port = free_port()
    config = FrontConfig(
        model=config.model,
        doors=DoorConfig(port=port),
        log_level="info",
        links=config.links,
    )
    url = f"http://127.0.0.1:{port}"
    answers: list[tuple[int, bytes]] = []

    def client(life: Life, pair: FakePair) -> None:
        assert request(url, "GET", "/health") == (503, b'{"status":"loading"}')
        assert request(url, "POST", "/generate", b'{"text": "a"}')[0] == 503
        assert not life.told.is_set()
        pair.may_start.set()
        assert life.told.wait(20)
        assert life.url == url
        assert request(url, "GET", "/health")[0] == 200
        assert b'"text":"ok"' in request(url, "POST", "/generate", b'{"text": "a"}')[1]
        head = request(url, "HEAD", "/health")
        assert head == (200, b"")
        pair.hold.set()
        pair.got_request.clear()
        waiting = threading.Thread(
            target=lambda: answers.append(request(url, "POST", "/generate", b'{"text": "a"}'))
        )
        waiting.start()
        assert pair.got_request.wait(20)
        os.kill(os.getpid(), signal.SIGTERM)
        waiting.join(20)

    for _ in range(2):  # an immediate restart on the same port works
        assert serve_while(config, client) == 0
        (answer,) = answers
        assert answer[0] == 200
        answers.clear()
        with pytest.raises(ConnectionRefusedError):
            request(url, "GET", "/health")


def test_death_of_another_process_ends_the_front_after_a_word_to_each_client(
    config: FrontConfig,
) -> None:
    answers: list[tuple[int, bytes]] = []

    def client(life: Life, pair: FakePair) -> None:
        pair.hold.set()
        pair.may_start.set()
        assert life.told.wait(20)
        body = b'{"text": "a"}'
        by_http = threading.Thread(
            target=lambda: answers.append(request(life.url, "POST", "/generate", body))
        )
        by_http.start()
        assert pair.got_request.wait(20)
        pair.got_request.clear()
        with socket_client(life) as dealer:
            dealer.send(b'{"type": "generate", "rid": "r", "text": "hi"}')
            assert pair.got_request.wait(20)
            tell_front(config.links, ChildDied("scheduler", "exit status 7"))
            assert dealer.poll(20_000)
            failed = json.loads(dealer.recv())
        assert (failed["type"], failed["rid"], failed["status"]) == ("failed", "r", 503)
        assert "its scheduler process died (exit status 7)" in failed["message"]
        by_http.join(20)
        end_pair(config.links)

    assert serve_while(config, client, signum=None) == 1
    ((status, body),) = answers
    assert status == 503
    assert b"its scheduler process died (exit status 7)" in body


def test_sigterm_while_loading_ends_at_once(config: FrontConfig) -> None:
    def client(life: Life, pair: FakePair) -> None:
        assert not life.told.is_set()

    assert serve_while(config, client) == 0


def test_adapters_of_the_command_line(config: FrontConfig) -> None:
    lora = LoRAConfig(lora=("n=/models/n", "m=/models/m,pinned"))
    config = msgspec.structs.replace(config, lora=lora)

    def client(life: Life, pair: FakePair) -> None:
        pair.may_start.set()
        assert life.told.wait(20)
        models = json.loads(request(life.url, "GET", "/v1/models")[1])
        assert [model["id"] for model in models["data"]] == ["tiny", "n", "m"]
        answer = request(life.url, "POST", "/generate", b'{"text": "a", "lora_path": "m"}')
        assert answer[0] == 200

    assert serve_while(config, client) == 0


def test_a_bad_adapter_of_the_command_line_ends_the_start(config: FrontConfig) -> None:
    config = msgspec.structs.replace(config, lora=LoRAConfig(lora=("n=/models/bad",)))
    life, pair = Life(), FakePair(config.links)
    pair.start()
    pair.may_start.set()
    with pytest.raises(ExceptionGroup) as failed:
        asyncio.run(server.serve(config, life))
    (error,) = failed.value.exceptions
    assert str(error) == "--lora n=/models/bad: it is bad"
    assert not life.told.is_set()
    end_pair(config.links)
    pair.join(20)


def end_pair(links: Links) -> None:
    """End the fake pair as the front of a whole set would."""
    send_to(links.scheduler, DrainReq())


def tell_front(links: Links, message: ToFront) -> None:
    send_to(links.front, message)


def send_to(address: str, message: msgspec.Struct) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    outbox = Outbox(context, address)
    outbox.send(message)
    outbox.close()
    context.term()


@contextlib.contextmanager
def socket_client(life: Life) -> "Iterator[zmq.Socket[bytes]]":
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.connect(paths.door_address(int(life.url.rpartition(":")[2])))
        yield dealer
    finally:
        dealer.close(linger=0)
        context.term()


def test_the_socket_door_answers_beside_http(config: FrontConfig) -> None:
    def client(life: Life, pair: FakePair) -> None:
        pair.may_start.set()
        assert life.told.wait(20)
        with socket_client(life) as dealer:
            dealer.send(b'{"type": "generate", "rid": "r", "text": "hi"}')
            assert dealer.poll(20_000)
            assert b'"text":"ok"' in dealer.recv()

    assert serve_while(config, client) == 0


@contextlib.contextmanager
def listening(host: str, port: int = 0) -> Iterator[list[socket.socket]]:
    listeners = server.listen(host, port)
    try:
        yield listeners
    finally:
        for listener in listeners:
            listener.close()


def test_a_taken_port_is_said_clearly() -> None:
    with listening("127.0.0.1") as (taken,):
        port = taken.getsockname()[1]
        with pytest.raises(server.CannotListen, match=rf"127\.0\.0\.1:{port}.*in use"):
            server.listen("127.0.0.1", port)
    with listening("127.0.0.1", port) as (again,):
        assert server.url_of("127.0.0.1", again) == f"http://127.0.0.1:{port}"


def test_a_host_that_is_not_ours() -> None:
    with pytest.raises(server.CannotListen, match="cannot listen on"):
        server.listen("192.0.2.1", 0)


def test_ipv6_urls_have_brackets() -> None:
    with listening("127.0.0.1") as (listener,):
        port = listener.getsockname()[1]
        assert server.url_of("::1", listener) == f"http://[::1]:{port}"


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::", "localhost"])
def test_both_families_are_served(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both = [
        (family, socket.SOCK_STREAM, 6, "", (address, 0))
        for family, address in ((socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1"))
    ]
    real = socket.getaddrinfo
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda name, *rest, **more: both if name == "localhost" else real(name, *rest, **more),
    )
    with listening(host) as listeners:
        (port,) = {listener.getsockname()[1] for listener in listeners}
        for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
            with socket.socket(family) as client:
                client.settimeout(20)
                client.connect((address, port))
        if host == "localhost":
            with pytest.raises(server.CannotListen, match="in use"):
                server.listen(host, port)


def test_one_family_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `localhost` names an address that no interface of this machine has."""
    both = [
        (family, socket.SOCK_STREAM, 6, "", (address, 0))
        for family, address in ((socket.AF_INET6, "2001:db8::1"), (socket.AF_INET, "127.0.0.1"))
    ]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: both)
    with listening("localhost") as (listener,):
        assert listener.getsockname()[0] == "127.0.0.1"


ALL_FILES = 2000 + limits.MAX_SOCKET_CONNECTIONS + server.OTHER_FILES + server.BACKLOG
NO_LIMIT = resource.RLIM_INFINITY


@pytest.mark.parametrize(
    ("limited", "raised", "http"),
    [
        ((1024, 8192), [(ALL_FILES, 8192)], 2000),
        ((1024, 4096), [(4096, 4096)], 2000),
        ((1024, NO_LIMIT), [(ALL_FILES, NO_LIMIT)], 2000),
        ((1024, 1512), [(1512, 1512)], 1000),  # half of the connections of each door
        ((ALL_FILES, ALL_FILES), [], 2000),
        ((NO_LIMIT, NO_LIMIT), [], 2000),
    ],
)
def test_each_door_has_files_of_its_own(
    limited: tuple[int, int],
    raised: list[tuple[int, int]],
    http: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calls = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limited)
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: calls.append(both))
    doors, sockets = server._allow_open_files(DoorConfig(max_connections=2000))
    assert calls == raised
    assert doors.max_connections == http
    assert sockets.connections == limits.MAX_SOCKET_CONNECTIONS * http // 2000
    assert ("--max-connections" in caplog.text) == (http < 2000)


@pytest.mark.parametrize("allowed", [0, 1, 257, 258, 300, 1024, 2815, 2816, 10**6])
def test_no_door_is_left_without_a_file(allowed: int) -> None:
    http, sockets = server.share_files(allowed, 2048)
    assert http >= 1
    assert sockets >= 1
    assert http + sockets <= max(allowed - server.OTHER_FILES, 2)
