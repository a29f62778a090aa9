"""One DEALER socket to a server's socket door, shared by every request of a client.

Owns the connection state and the exchanges by rid; when the connection is lost, all exchanges fail.
Built by AsyncClient inside a running loop. The meaning of messages must not enter.

ZeroMQ reconnects by itself and keeps unsent messages. A request kept that way would start at a
later server, long after its caller saw it fail; the Abort queued after it ends it there.
(ZMQ_IMMEDIATE would drop it, but also the last messages of a server that stops.)
"""

import asyncio
import itertools
import logging
import struct

import msgspec
import zmq
import zmq.asyncio

from ..wire import codec, paths
from ..wire.client_messages import Abort, Delta, Failed, Flushed, FromClient, LoRAs, Pong, ToClient
from .errors import ClientError, RequestRefused, RequestTimeout, ServerGone

RECONNECT_MS = 50
RECONNECT_MAX_MS = 1000
MAX_ANSWER_BYTES = 64 << 20

log = logging.getLogger(__name__)
_names = itertools.count()


class Exchange:
    """One request on a link, with its received but unread messages."""

    def __init__(self, link: "Link", key: str) -> None:
        self._link = link
        self._key = key
        self._came: asyncio.Queue[ToClient | ClientError] = asyncio.Queue()

    def put(self, message: ToClient | ClientError) -> None:
        self._came.put_nowait(message)

    async def next(self, seconds: float | None) -> ToClient:
        """Return the next message. Raises RequestTimeout, RequestRefused or ServerGone."""
        try:
            async with asyncio.timeout(seconds):
                message = await self._came.get()
        except TimeoutError:
            raise RequestTimeout(f"the server sent nothing for {seconds} s") from None
        if isinstance(message, ClientError):
            raise message
        if isinstance(message, Failed):
            raise RequestRefused(
                message.status, message.message, message.param, message.retry_after
            )
        return message

    def forget(self) -> None:
        self._link.forget(self._key)

    def abort(self) -> None:
        """Forget the exchange; send Abort unless its last message has arrived."""
        if self._link.forget(self._key) and not self._link.closed:
            self._link.send(Abort(self._key))


class Link:
    def __init__(self, address: str, heartbeat_seconds: float) -> None:
        self.address = address
        self.loop = asyncio.get_running_loop()
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._monitor = _monitor(self._context, self._socket)
        self._plain: zmq.Socket[bytes] = zmq.Socket.shadow(self._socket.underlying)
        self._events: zmq.Socket[bytes] = zmq.Socket.shadow(self._monitor.underlying)
        self._up = asyncio.Event()
        self._exchanges: dict[str, Exchange] = {}
        try:
            _connect(self._socket, address, heartbeat_seconds)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._serving = self.loop.create_task(self._serve())

    @property
    def closed(self) -> bool:
        return self._context.closed

    async def up(self, seconds: float) -> None:
        """Wait for the connection. Raises ServerGone when there is none within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                await self._up.wait()
        except TimeoutError:
            raise ServerGone(f"no server answers at {self.address}") from None

    def open(self, key: str, message: FromClient) -> Exchange:
        """Send `message`; return the exchange that receives the messages for `key`.

        Raises ServerGone without a connection, RequestRefused if the message cannot be encoded or
        is too large.
        """
        self._note_pending_events()
        if not self._up.is_set():
            raise ServerGone(f"lost the server at {self.address}")
        exchange = self._exchanges[key] = Exchange(self, key)
        try:
            self.send(message)
        except BaseException:
            self.forget(key)
            raise
        return exchange

    def send(self, message: FromClient) -> None:
        """Raises RequestRefused if the message cannot be encoded (400) or is too large (413)."""
        try:
            payload = codec.encode(message)
        except (UnicodeEncodeError, OverflowError) as error:
            raise RequestRefused(400, f"cannot be sent: {error}") from error
        if len(payload) > paths.MAX_REQUEST_BYTES:
            limit = paths.MAX_REQUEST_BYTES
            raise RequestRefused(413, f"the request has {len(payload)} bytes; {limit} are allowed")
        # DONTWAIT completes the future within the call.
        asyncio.ensure_future(self._socket.send(payload, zmq.DONTWAIT)).result()

    def forget(self, key: str) -> bool:
        """Drop the exchange of `key`; return whether its last message was still to come."""
        return self._exchanges.pop(key, None) is not None

    async def aclose(self) -> None:
        self._serving.cancel()
        await asyncio.wait([self._serving])

    async def _serve(self) -> None:
        """Read messages and events until cancelled, then close the socket."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._read())
                group.create_task(self._watch())
        finally:
            self._up.clear()
            self._fail_all("this client was closed")
            self._socket.disable_monitor()
            self._context.destroy(linger=0)

    async def _read(self) -> None:
        while True:
            await self._socket.poll()  # not recv: `_note` may read first, in order
            self._take_pending()

    def _take(self, frames: list[bytes]) -> None:
        try:
            message = codec.decode_to_client(b"".join(frames))
        except (msgspec.DecodeError, RecursionError) as error:
            log.warning("dropped a malformed answer of %s: %s", self.address, error)
            return
        key = seq_key(message.seq) if isinstance(message, Pong | Flushed | LoRAs) else message.rid
        exchange = self._exchanges.get(key)
        if exchange is not None:  # None: forgotten while the message was in flight
            exchange.put(message)
            if not isinstance(message, Delta):
                self.forget(key)
        elif isinstance(message, Failed) and not message.rid:
            log.warning("%s could not read a request: %s", self.address, message.message)

    async def _watch(self) -> None:
        while True:
            await self._monitor.poll()
            self._note_pending_events()

    def _note_pending_events(self) -> None:
        """Handle pending events, so that an old disconnect does not fail a request sent next."""
        while not self.closed:
            try:
                self._note(self._events.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                return

    def _note(self, frames: list[bytes]) -> None:
        event, _ = struct.unpack("=hi", frames[0])
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._up.set()
            return
        self._up.clear()
        self._take_pending()  # deliver answers that arrived before the disconnect
        self._fail_all(f"lost the server at {self.address}")

    def _take_pending(self) -> None:
        while True:
            try:
                self._take(self._plain.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                return

    def _fail_all(self, why: str) -> None:
        """Fail all exchanges. They stay in the table so that their callers still send Aborts."""
        for exchange in self._exchanges.values():
            exchange.put(ServerGone(why))


def seq_key(seq: int) -> str:
    """Return the exchange key of a question with a seq; no rid has a space."""
    return f"seq {seq}"


def _monitor(context: zmq.asyncio.Context, dealer: zmq.asyncio.Socket) -> zmq.asyncio.Socket:
    name = f"inproc://client-link-{next(_names)}"
    dealer.monitor(name, zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
    monitor = context.socket(zmq.PAIR)
    monitor.setsockopt(zmq.RCVHWM, 0)  # a full queue would block ZeroMQ's own thread
    monitor.connect(name)
    return monitor


def _connect(dealer: zmq.asyncio.Socket, address: str, heartbeat_seconds: float) -> None:
    dealer.setsockopt(zmq.LINGER, 0)  # a server aborts the requests of a client that disconnects
    dealer.setsockopt(zmq.SNDHWM, 0)  # sends never block; callers bound their requests
    dealer.setsockopt(zmq.RCVHWM, 0)  # answers have a bounded length and are read at once
    dealer.setsockopt(zmq.MAXMSGSIZE, MAX_ANSWER_BYTES)
    dealer.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
    dealer.setsockopt(zmq.HEARTBEAT_IVL, round(heartbeat_seconds * 1000 / 3))
    dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, round(heartbeat_seconds * 1000))
    if "[" in address:
        dealer.setsockopt(zmq.IPV6, 1)
    try:
        dealer.connect(address)
    except zmq.ZMQError as error:
        raise paths.BadAddress(f"cannot connect to {address}: {error}") from error
