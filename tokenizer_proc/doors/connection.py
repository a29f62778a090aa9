"""HttpConnection: requests in, answers out in the same order, a deadline for every phase.

uvicorn's server accepts connections and makes an HttpConnection for each. `phases` decides the
phase and its deadline, `connection_table` which connection is closed when too many are open. What a
request means does not enter.
"""

import asyncio
import logging
from collections import deque
from http import HTTPStatus
from typing import Any, ClassVar

import msgspec
from uvicorn import Config
from uvicorn.server import ServerState

from ..errors import Refused
from ..limits import MAX_AHEAD_BYTES
from . import access_log, request_head
from .connection_table import ConnectionTable, TableFull
from .cycle import Cycle
from .errors import ApiError, as_api_error
from .phases import RULES, Phase, Progress, Rules, Verdict
from .request_reader import Head, RequestReader

_BODY_BUFFER_BYTES = 65536  # of a body not yet read by the application; above, reading pauses

log = logging.getLogger(__name__)


class HttpConnection(asyncio.Protocol):
    table: ClassVar[ConnectionTable["HttpConnection"]]  # set by `http_protocol`
    rules: ClassVar[Rules]
    logs_requests: ClassVar[bool]

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self._loop = _loop or asyncio.get_running_loop()
        self._app = config.loaded_app
        self._server = server_state
        self._reader = RequestReader(self)
        self._progress = Progress(self._loop.time(), self.rules)
        self._timer: asyncio.TimerHandle | None = None
        self.may_write = asyncio.Event()
        self.may_write.set()
        self._reading_paused = False
        self._received = bytearray()  # not parsed yet
        self._unanswered: deque[Cycle] = deque()  # the first one is being served
        self._refusal: ApiError | None = None  # to be sent after the pending answers

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport
        self._server.connections.add(self)  # type: ignore[arg-type]
        peer = transport.get_extra_info("peername")
        try:
            victim = self.table.add(self, str(peer[0]) if isinstance(peer, tuple) else "")
        except TableFull:
            self._refuse(self._busy("have requests"), linger=False)
            return
        if victim is not None:
            victim.give_way()
        self._settle()

    def data_received(self, data: bytes) -> None:
        if not self._progress.ending and self._refusal is None:
            self._received += data
            self._read_on()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.connections.discard(self)
        self.table.remove(self)
        self._progress.closes(self._loop.time(), 0)
        if self._timer is not None:
            self._timer.cancel()
        self._drop_cycles()
        self._reader.close()
        del self._reader  # breaks a reference cycle
        self.may_write.set()

    def pause_writing(self) -> None:
        self.may_write.clear()
        self._progress.blocked(self._loop.time(), self._transport.get_write_buffer_size())
        self._settle()

    def resume_writing(self) -> None:
        self.may_write.set()
        self._progress.unblocked(self._loop.time())
        self._loop.call_soon(self._read_on)

    def shutdown(self) -> None:
        """Close now, or after the pending answer; uvicorn calls it when the server ends."""
        if not self._unanswered:
            self._close()
        for cycle in self._unanswered:
            cycle.keep_alive = False

    def give_way(self) -> None:
        """Close at once to make room for a new connection."""
        if self._progress.phase in (Phase.FRESH, Phase.HEAD, Phase.BODY):
            self._refuse(self._busy("are open"), linger=False)
        elif self._progress.phase is Phase.IDLE:
            self._close()
        else:
            self._transport.abort()

    # Line, used by cycles

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def body_taken(self) -> None:
        self._pace_reading()

    def answered(self, cycle: Cycle) -> None:
        self._unanswered.popleft()
        self._progress.answered(self._loop.time())
        self._log_cycle(cycle)
        if cycle.more_body:
            self._linger()
        elif not cycle.keep_alive:
            self._close()
        elif self._unanswered:
            self._serve(self._unanswered[0])
        elif self._refusal is not None:
            self._refuse(self._refusal)
        if self._received:
            self._loop.call_soon(self._read_on)
        self._settle()

    def failed(self, cycle: Cycle, error: ApiError) -> None:
        self._refuse(error)

    # Sink, called by the reader

    def head_began(self) -> None:
        self._progress.head_began(self._loop.time())

    def head_ended(self, head: Head) -> None:
        self._progress.head_ended(self._loop.time())
        cycle = Cycle(
            self,
            self._scope(head),
            keep_alive=head.keep_alive,
            expects_continue=request_head.expects_continue(head.version, head.headers),
            began=self._loop.time(),
            headers=self._server.default_headers,
        )
        self._unanswered.append(cycle)
        if len(self._unanswered) == 1:
            self._serve(cycle)

    def body_came(self, data: bytes) -> None:
        self._progress.body_came(len(data))
        self._unanswered[-1].feed(data)

    def body_ended(self) -> None:
        self._progress.body_ended(self._loop.time())
        self._unanswered[-1].end_body()

    def _scope(self, head: Head) -> dict[str, object]:
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": head.version,
            "method": head.method,
            "scheme": "http",
            "path": request_head.path_of(head.raw_path),
            "raw_path": head.raw_path,
            "query_string": head.query,
            "root_path": "",
            "headers": head.headers,
            "server": self._transport.get_extra_info("sockname"),
            "client": self._transport.get_extra_info("peername"),
        }

    def _serve(self, cycle: Cycle) -> None:
        task = self._loop.create_task(cycle.run(self._app))
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    # Reading and deadlines

    def _read_on(self) -> None:
        """Parse received bytes, up to the end of a request that must be answered first."""
        try:
            while self._received and self._progress.wants_bytes:
                self._reader.read(self._received)
        except ApiError as error:
            self._refuse_in_turn(error)
        if not self._progress.ending:
            self._settle()

    def _settle(self) -> None:
        """Update the connection table, pause or resume reading, set the timer."""
        if self._progress.waits_for_client:
            self.table.waits(self)
        else:
            self.table.works(self)
        self._pace_reading()
        deadline = self._progress.deadline
        if deadline is None:
            return  # a running timer rechecks the deadline when it fires
        if self._timer is not None:
            if self._timer.when() <= deadline:
                return
            self._timer.cancel()
        self._timer = self._loop.call_at(deadline, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        deadline = self._progress.deadline
        if deadline is None or self._loop.time() < deadline:
            self._settle()
            return
        match self._progress.verdict:
            case Verdict.CLOSE:
                self._close()
            case Verdict.ABORT:
                self._transport.abort()
            case Verdict.REFUSE:
                what = "headers" if self._progress.phase is Phase.HEAD else "body"
                self._refuse(ApiError(408, f"the {what} came too slowly"))

    def _pace_reading(self) -> None:
        pause = not self._progress.ending and (
            len(self._received) > MAX_AHEAD_BYTES
            or any(cycle.unread_bytes > _BODY_BUFFER_BYTES for cycle in self._unanswered)
        )
        if pause == self._reading_paused or self._transport.is_closing():
            return
        self._reading_paused = pause
        if pause:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    # The end

    def _refuse_in_turn(self, error: ApiError) -> None:
        """Refuse the request being read, after the answers that come before it."""
        self._received.clear()
        due = list(self._unanswered)
        broken = due.pop() if due and due[-1].more_body else None
        if not due:
            self._refuse(error)
            return
        self._refusal = error
        if broken is not None:
            self._unanswered.pop()
            self._progress.answered(self._loop.time())

    def _busy(self, what: str) -> ApiError:
        return as_api_error(
            Refused(503, f"the server is busy: {self.table.most} connections {what}")
        )

    def _refuse(self, error: ApiError, *, linger: bool = True) -> None:
        """Send `error` in place of the pending answers, and close."""
        if any(cycle.started for cycle in self._unanswered):
            self._transport.abort()
            return
        if not self._unanswered:
            self._log("-", b"-", error.status, 0, 0.0)
        for cycle in self._unanswered:
            cycle.status = error.status
        self._drop_cycles()
        self.write(_raw_answer(error))
        if linger:
            self._linger()
        else:
            self._close()

    def _drop_cycles(self) -> None:
        for cycle in self._unanswered:
            cycle.disconnect()
            self._log_cycle(cycle)
        self._unanswered.clear()

    def _linger(self) -> None:
        """Close after discarding input for a while: unread bytes would reset the connection."""
        self._received.clear()
        self._progress.lingers(self._loop.time())
        if not self._transport.is_closing():
            self._transport.write_eof()
            self._settle()

    def _close(self) -> None:
        self._progress.closes(self._loop.time(), self._transport.get_write_buffer_size())
        self._transport.close()
        self._settle()

    def _log_cycle(self, cycle: Cycle) -> None:
        scope, seconds = cycle.scope, self._loop.time() - cycle.began
        self._log(scope["method"], scope["raw_path"], cycle.status, cycle.sent_bytes, seconds)

    def _log(self, method: str, path: bytes, status: int, sent_bytes: int, seconds: float) -> None:
        if self.logs_requests:
            log.info("%s", access_log.line(method, path, status, sent_bytes, seconds))


def _raw_answer(error: ApiError) -> bytes:
    """Return a whole error answer for input that never became a request."""
    body = msgspec.json.encode(error.body)
    extra = b"".join(f"{name}: {value}\r\n".encode() for name, value in error.headers)
    return (
        b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
        b"%sconnection: close\r\n\r\n%s"
    ) % (error.status, HTTPStatus(error.status).phrase.encode(), len(body), extra, body)


def http_protocol(
    max_connections: int, *, rules: Rules = RULES, logs_requests: bool = False
) -> type[HttpConnection]:
    """Return the protocol class of one server; uvicorn makes an instance per connection."""
    shared = {
        "table": ConnectionTable(max_connections),
        "rules": rules,
        "logs_requests": logs_requests,
    }
    return type("HttpConnection", (HttpConnection,), shared)
