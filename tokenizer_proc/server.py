"""The front process: binds its doors early, feeds the Front, announces readiness, drains.

`python -m tokenloom.tokenizer_proc` runs `run` through `wire.child`. One uvloop holds everything:
the mailbox, uvicorn, the socket door. No request is looked at in here.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator

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
from .doors.http import HttpDoor
from .doors.limits import SHUTDOWN_SECONDS
from .doors.socket import SocketDoor
from .encode import load_text
from .front import Front

KEEP_ALIVE_SECONDS = 75  # idle HTTP connections; above the usual 60 s of clients and proxies
BACKLOG = 2048

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
                http="httptools",
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
    path = _local_path(config)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    listener = listen(config.doors.host, config.doors.port)
    context = zmq.asyncio.Context()
    plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
    try:
        scheduler = Outbox(plain, config.links.scheduler)
        mailbox = AsyncMailbox(context, config.links.front, codec.to_front())
        front = Front(
            config.model.served_model_name or model_name(path, path),
            scheduler,
            config.doors.max_queued_requests,
        )
        address = config.doors.socket or paths.door_address(listener.getsockname()[1])
        door = SocketDoor(front, address, context)
        http = HttpServer.over(front, config.doors)
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(http.serve([listener]))
            helpers = [
                group.create_task(_read_mail(mailbox, front)),
                group.create_task(door.serve()),
                group.create_task(_announce(front, config, life, listener)),
            ]
            await stop.wait()
            await _drain(front)
            http.should_exit = True
            await serving
            door.close()
            for task in helpers:
                task.cancel()
    finally:
        listener.close()
        context.destroy(linger=None)
    return 0


async def _read_mail(mailbox: AsyncMailbox[ToFront], front: Front) -> None:
    while True:
        for message in await mailbox.receive():
            front.dispatch(message)


async def _announce(
    front: Front, config: FrontConfig, life: ChildLife, listener: socket.socket
) -> None:
    """Load the tokenizer beside the scheduler's loading, then tell the launcher that we serve."""
    front.use_text(*await asyncio.to_thread(load_text, _local_path(config)))
    await front.started.wait()
    life.ready(url_of(config.doors.host, listener))


async def _drain(front: Front) -> None:
    log.info("draining: %d requests are in flight", front.in_flight)
    front.drain()
    if front.info is not None:  # a scheduler that still loads has nothing to finish
        await front.drained.wait()


def _local_path(config: FrontConfig) -> str:
    if config.model.model is None:
        raise ValueError("the launcher must resolve the model to a local path")
    return config.model.model
