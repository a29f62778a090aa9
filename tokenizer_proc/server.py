"""The front process: bind the doors early, feed the Front, announce readiness, drain.

`python -m tokenloom.tokenizer_proc` runs `run` through `wire.child`. One uvloop runs the mailbox,
uvicorn and the socket door. Requests are not interpreted here.
"""

import asyncio
import contextlib
import errno
import logging
import resource
import signal
import socket
from collections.abc import Coroutine, Iterator

import msgspec
import uvicorn
import uvloop
import zmq
import zmq.asyncio

from ..model_files.resolve import model_name
from ..wire import codec, paths
from ..wire.channel import AsyncMailbox, Outbox
from ..wire.child import ChildLife
from ..wire.config import FrontConfig
from ..wire.door_config import DoorConfig
from ..wire.messages import ToFront
from ..wire.strays import Strays
from .adapters import AdapterError
from .doors.connection import http_protocol
from .doors.http import HttpDoor
from .doors.phases import RULES, Rules
from .doors.router import DoorLimits
from .doors.socket import SocketDoor
from .doors.web_guard import WebGuard
from .encode import load_text
from .front import Front
from .limits import MAX_SOCKET_CONNECTIONS, SHUTDOWN_SECONDS
from .progress import TICK_S
from .recommended import recommended_sampling

BACKLOG = 2048  # connections that one turn may accept before those that give way are closed
OTHER_FILES = 256  # open files beside the doors' connections

log = logging.getLogger(__name__)


class CannotListen(ValueError):
    """The HTTP address cannot be bound; the message says which and why."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets, one for each address of `host`, all with the same port.

    Port 0 takes a free one. A port in TIME_WAIT counts as free. `::` means both families.
    """
    listeners: list[socket.socket] = []
    missing: OSError | None = None
    try:
        for family, address in _addresses(host):
            try:
                listeners.append(_listen(family, address, port))
            except OSError as error:
                if error.errno not in _NO_SUCH_ADDRESS:
                    raise
                missing = error  # `localhost` may resolve to a family that this machine lacks
            else:
                port = port or listeners[0].getsockname()[1]
        if missing is not None and not listeners:
            raise missing
    except OSError as error:
        for listener in listeners:
            listener.close()
        reason = error.strerror or str(error)
        raise CannotListen(f"cannot listen on {host}:{port}: {reason}") from None
    return listeners


_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def _addresses(host: str) -> list[tuple[socket.AddressFamily, str]]:
    """Return the addresses of `host`, IPv4 before IPv6, each once."""
    found = socket.getaddrinfo(host or None, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    unique = dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found)
    return sorted(unique)


def _listen(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    both = family == socket.AF_INET6 and address == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(
        (address, port), family=family, backlog=BACKLOG, dualstack_ipv6=both
    )


def url_of(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """uvicorn inside our loop, without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    @classmethod
    def over(cls, front: Front, doors: DoorConfig, rules: Rules = RULES) -> "HttpServer":
        protocol = http_protocol(doors.max_connections, rules=rules, logs_requests=doors.access_log)
        return cls(
            uvicorn.Config(
                HttpDoor(front, doors.max_body_bytes, WebGuard(doors.allowed_hosts, doors.host)),
                http=protocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            )
        )


def run(config: FrontConfig, life: ChildLife) -> int:
    """Serve until SIGTERM and the end of its drain; return the exit status."""
    return uvloop.run(serve(config, life))


async def serve(config: FrontConfig, life: ChildLife) -> int:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    with contextlib.ExitStack() as stack:
        doors, socket_limits = _allow_open_files(config.doors)
        listeners = listen(config.doors.host, config.doors.port)
        for listener in listeners:
            stack.enter_context(listener)
        context = zmq.asyncio.Context()
        stack.callback(context.term)  # after all sockets are closed; waits until they have sent
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
        scheduler = Outbox(plain, config.links.scheduler)
        stack.callback(scheduler.close)
        strays = Strays()
        mailbox = AsyncMailbox(context, config.links.front, codec.to_front(), strays)
        stack.callback(mailbox.close)
        front = _make_front(config, scheduler, strays)
        address = config.doors.socket or paths.door_address(listeners[0].getsockname()[1])
        door = SocketDoor(front, address, socket_limits)
        stack.callback(door.close)
        await _run_until(
            stop,
            front,
            HttpServer.over(front, doors),
            listeners,
            [
                _read_mail(mailbox, front),
                _stop_on_failure(front, stop),
                _watch_progress(front),
                door.serve(),
                _announce(front, config, life, (url_of(config.doors.host, listeners[0]), address)),
            ],
            config.drain_timeout,
        )
    return 1 if front.failed.is_set() else 0


def _allow_open_files(doors: DoorConfig) -> tuple[DoorConfig, DoorLimits]:
    """Raise the soft limit of open files; return the connections that each door may hold.

    Each door has its own share, so that clients of one cannot take the files of the other.
    """
    wanted = doors.max_connections + MAX_SOCKET_CONNECTIONS + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = soft
    wished = wanted + BACKLOG  # above it, nothing is accepted for a moment
    if soft != resource.RLIM_INFINITY and soft < wished:
        allowed = wished if hard == resource.RLIM_INFINITY else min(wished, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed == resource.RLIM_INFINITY:
        allowed = wanted
    http, sockets = share_files(allowed, doors.max_connections)
    if http < doors.max_connections:
        log.warning(
            "%d files may be open (ulimit -n), --max-connections needs %d: "
            "%d HTTP connections and %d clients of the socket door are served",
            *(allowed, wanted, http, sockets),
        )
    limited = msgspec.structs.replace(doors, max_connections=http)
    return limited, DoorLimits(connections=sockets)


def share_files(allowed: int, http: int) -> tuple[int, int]:
    """Split `allowed` files between HTTP connections and clients of the socket door."""
    wanted = http + MAX_SOCKET_CONNECTIONS
    room = max(allowed - OTHER_FILES, 2)
    if room >= wanted:
        return http, MAX_SOCKET_CONNECTIONS
    sockets = max(room * MAX_SOCKET_CONNECTIONS // wanted, 1)
    return room - sockets, sockets


def _make_front(config: FrontConfig, scheduler: Outbox, strays: Strays) -> Front:
    path = _local_path(config)
    name = config.model.served_model_name or model_name(path, path)
    front = Front(name, scheduler, config.doors.max_queued_requests, config.lora, strays)
    front.recommended = recommended_sampling(path)
    return front


async def _run_until(
    stop: asyncio.Event,
    front: Front,
    http: HttpServer,
    listeners: list[socket.socket],
    helpers: list[Coroutine[None, None, None]],
    drain_timeout: float,
) -> None:
    """Serve until `stop`, drain, let HTTP send its last bytes, then cancel the helpers."""
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(http.serve(listeners))
        tasks = [group.create_task(helper) for helper in helpers]
        await stop.wait()
        if not front.failed.is_set():
            await _drain(front, drain_timeout)
        http.should_exit = True
        await serving
        for task in tasks:
            task.cancel()


async def _read_mail(mailbox: AsyncMailbox[ToFront], front: Front) -> None:
    while True:
        for message in await mailbox.receive():
            front.dispatch(message)


async def _stop_on_failure(front: Front, stop: asyncio.Event) -> None:
    await front.failed.wait()
    stop.set()


async def _watch_progress(front: Front) -> None:
    await front.started.wait()
    while True:
        front.health.tick(asyncio.get_running_loop().time())
        await asyncio.sleep(TICK_S)


async def _announce(
    front: Front, config: FrontConfig, life: ChildLife, doors: tuple[str, str]
) -> None:
    """Load the tokenizer while the scheduler loads, then report to the launcher that we serve."""
    url, address = doors
    front.use_text(*await asyncio.to_thread(load_text, _local_path(config)))
    try:
        await front.load_first_adapters()
    except AdapterError:
        if not front.drained.is_set():  # else the server was stopped before it was ready
            raise
    await front.started.wait()
    adapters = f"{len(config.lora.lora)} loaded" if config.lora.enabled else "off (--lora)"
    log.info("listening: HTTP at %s, socket door at %s; adapters: %s", url, address, adapters)
    life.ready(url)


async def _drain(front: Front, timeout_s: float) -> None:
    log.info("draining: %d requests are in flight", front.in_flight)
    front.drain(timeout_s)
    if front.info is not None:  # a loading scheduler has nothing to drain
        await front.drained.wait()


def _local_path(config: FrontConfig) -> str:
    if config.model.model is None:
        raise ValueError("the launcher must resolve the model to a local path")
    return config.model.model
