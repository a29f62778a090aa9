"""The front process: binds its doors early, feeds the Front, announces readiness, drains.

`python -m tokenloom.tokenizer_proc` runs `run` through `wire.child`. One uvloop holds everything:
the mailbox, uvicorn, the socket door. No request is looked at in here.
"""

import asyncio
import contextlib
import logging
import resource
import signal
import socket
from collections.abc import Coroutine, Iterator

import uvicorn
import uvloop
import zmq
import zmq.asyncio

from ..model_files.resolve import model_name
from ..wire import codec, paths
from ..wire.channel import AsyncMailbox, Outbox
from ..wire.child import ChildLife
from ..wire.config import DoorConfig, FrontConfig
from ..wire.messages import ToFront
from .adapters import AdapterError
from .doors.connection import bounded_http
from .doors.http import HttpDoor
from .doors.socket import SocketDoor
from .encode import load_text
from .front import Front
from .limits import SHUTDOWN_SECONDS
from .progress import TICK_S

KEEP_ALIVE_SECONDS = 75  # idle HTTP connections; above the usual 60 s of clients and proxies
BACKLOG = 2048
OTHER_FILES = 256  # open files beside the HTTP connections; clients of the socket door among them

log = logging.getLogger(__name__)


class CannotListen(ValueError):
    """The HTTP address cannot be had; the message says which and why."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one. A port in TIME_WAIT counts as free."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CannotListen(f"cannot listen on {host}:{port}: {reason}") from None


def url_of(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer(uvicorn.Server):
    """uvicorn inside our loop; signals are ours."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    @classmethod
    def over(cls, front: Front, doors: DoorConfig) -> "HttpServer":
        return cls(
            uvicorn.Config(
                HttpDoor(front, doors.max_body_bytes),
                http=bounded_http(doors.max_connections),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=SHUTDOWN_SECONDS,
            )
        )


def run(config: FrontConfig, life: ChildLife) -> int:
    """Serve until a SIGTERM and the drain that it starts; the exit status."""
    return uvloop.run(serve(config, life))


async def serve(config: FrontConfig, life: ChildLife) -> int:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    with contextlib.ExitStack() as stack:
        _allow_open_files(config.doors.max_connections + OTHER_FILES)
        listener = stack.enter_context(listen(config.doors.host, config.doors.port))
        context = zmq.asyncio.Context()
        stack.callback(context.term)  # after all sockets are closed; it waits for their last words
        plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
        scheduler = Outbox(plain, config.links.scheduler)
        stack.callback(scheduler.close)
        mailbox = AsyncMailbox(context, config.links.front, codec.to_front())
        stack.callback(mailbox.close)
        front = _make_front(config, scheduler)
        address = config.doors.socket or paths.door_address(listener.getsockname()[1])
        door = SocketDoor(front, address, context)
        stack.callback(door.close)
        await _run_until(
            stop,
            front,
            HttpServer.over(front, config.doors),
            listener,
            [
                _read_mail(mailbox, front),
                _stop_on_failure(front, stop),
                _watch_progress(front),
                door.serve(),
                _announce(front, config, life, url_of(config.doors.host, listener)),
            ],
            config.drain_timeout,
        )
    return 1 if front.failed.is_set() else 0


def _allow_open_files(wanted: int) -> None:
    """Raise the soft limit, where the hard one lets us: at the limit nothing is accepted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed < wanted:
        log.warning("%d files may be open (ulimit -n); --max-connections needs %d", allowed, wanted)


def _make_front(config: FrontConfig, scheduler: Outbox) -> Front:
    path = _local_path(config)
    name = config.model.served_model_name or model_name(path, path)
    return Front(name, scheduler, config.doors.max_queued_requests, config.lora)


async def _run_until(
    stop: asyncio.Event,
    front: Front,
    http: HttpServer,
    listener: socket.socket,
    helpers: list[Coroutine[None, None, None]],
    drain_timeout: float,
) -> None:
    """Serve until `stop`, drain, let HTTP send its last bytes, then end the helpers."""
    async with asyncio.TaskGroup() as group:
        serving = group.create_task(http.serve([listener]))
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
        front.tick(asyncio.get_running_loop().time())
        await asyncio.sleep(TICK_S)


async def _announce(front: Front, config: FrontConfig, life: ChildLife, url: str) -> None:
    """Load the tokenizer beside the scheduler's loading, then tell the launcher that we serve."""
    front.use_text(*await asyncio.to_thread(load_text, _local_path(config)))
    try:
        await front.load_first_adapters()
    except AdapterError:
        if not front.drained.is_set():  # else the end came first, and is no failure
            raise
    await front.started.wait()
    life.ready(url)


async def _drain(front: Front, timeout_s: float) -> None:
    log.info("draining: %d requests are in flight", front.in_flight)
    front.drain(timeout_s)
    if front.info is not None:  # a scheduler that still loads has nothing to finish
        await front.drained.wait()


def _local_path(config: FrontConfig) -> str:
    if config.model.model is None:
        raise ValueError("the launcher must resolve the model to a local path")
    return config.model.model
