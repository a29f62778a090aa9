"""Run a workload against a target: closed and open loops, chats turn by turn, one Record each.

Called by `serve` and `peers` with values from `workloads`. Also measures the load generator: how
late it sees data and its share of a core.
"""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from .summary import OK, STOPPED, Record
from .targets import RequestFailed, Target
from .workloads import Closed, Open, Session, Stream, Workload

_PROBE_SECONDS = 0.02
_STAMP_BYTES = 8


@dataclass(frozen=True)
class Driver:
    """How to send requests; `encode` turns an answer's text into ids for later prompts."""

    target: Target
    timeout: float  # seconds per request, in total
    encode: Callable[[str], Sequence[int]] | None = None
    on_record: Callable[[Record], None] = lambda _record: None


@dataclass(eq=False)
class Run:
    """Records of a run; `messages` holds one full message for each kind of error."""

    records: list[Record] = field(default_factory=list)
    messages: dict[str, str] = field(default_factory=dict)
    cpu_share: float = 0.0  # of one core, this process
    lag: list[float] = field(default_factory=list)  # seconds from bytes ready to seen


async def run_workload(workload: Workload, driver: Driver) -> Run:
    """Run a workload; errors of the server go into the records' outcomes."""
    run = Run()
    cpu, start = time.process_time(), time.perf_counter()
    with LagProbe() as probe:
        background = [
            asyncio.create_task(_stream(stream, driver, run))
            for stream in workload
            if stream.background
        ]
        try:
            async with asyncio.TaskGroup() as group:
                for stream in workload:
                    if not stream.background:
                        group.create_task(_stream(stream, driver, run))
        finally:
            for task in background:
                task.cancel()
            await asyncio.gather(*background, return_exceptions=True)
        for task in background:
            if not task.cancelled():
                task.result()
    run.lag = probe.seen
    run.cpu_share = (time.process_time() - cpu) / max(time.perf_counter() - start, 1e-9)
    return run


async def _stream(stream: Stream, driver: Driver, run: Run) -> None:
    async with asyncio.TaskGroup() as group:
        match stream.pace:
            case Closed(in_flight):
                sessions = iter(stream.sessions)
                for _ in range(in_flight):
                    group.create_task(_worker(sessions, stream.label, driver, run))
            case Open(times):
                start = time.perf_counter()
                for session, seconds in zip(stream.sessions, times, strict=True):
                    due = start + seconds
                    await asyncio.sleep(max(0.0, due - time.perf_counter()))
                    group.create_task(_session(session, stream.label, driver, run, due))


async def _worker(sessions: Iterator[Session], label: str, driver: Driver, run: Run) -> None:
    for session in sessions:
        await _session(session, label, driver, run, None)


async def _session(
    session: Session, label: str, driver: Driver, run: Run, due: float | None
) -> None:
    said: list[int] = []
    for turn in session:
        said += turn.tokens
        record = Record(label, turn.max_tokens, sent=time.perf_counter(), due=due)
        due = None  # a schedule is for first turns
        answer = await _request(said, record, driver, run)
        if answer is None:
            return  # the rest of a broken conversation would measure something else
        said += answer or turn.stand_in


async def _request(
    prompt: Sequence[int], record: Record, driver: Driver, run: Run
) -> Sequence[int] | None:
    """Return the ids of the answer, empty if unknown; None if the request failed."""
    try:
        async with asyncio.timeout(driver.timeout):
            reply = await driver.target.ask(prompt, record)
    except TimeoutError:
        record.outcome = "timeout"
        return None
    except RequestFailed as error:
        record.outcome = error.kind
        run.messages.setdefault(error.kind, str(error))
        return None
    except asyncio.CancelledError:
        record.outcome = STOPPED
        raise
    finally:
        record.ended = time.perf_counter()
        run.records.append(record)
        driver.on_record(record)
    assert record.outcome == OK
    if reply.token_ids is not None:
        return reply.token_ids
    return driver.encode(reply.text) if driver.encode else []


class LagProbe:
    """Samples the delay in seconds between readable bytes and this event loop seeing them.

    A thread writes the time into a socket pair every 20 ms and the loop reads the other end.
    """

    def __init__(self) -> None:
        self.seen: list[float] = []
        self._over = threading.Event()
        self._near, self._far = socket.socketpair()
        self._near.setblocking(False)
        self._thread = threading.Thread(target=self._write, name="lag-probe", daemon=True)

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._near, self._read)
        self._thread.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self._over.set()
        self._loop.remove_reader(self._near)
        self._near.close()
        self._thread.join()
        self._far.close()

    def _write(self) -> None:
        while True:
            try:
                self._far.send(time.perf_counter_ns().to_bytes(_STAMP_BYTES, "little"))
            except OSError:
                return  # the loop's end is closed
            if self._over.wait(_PROBE_SECONDS):
                return

    def _read(self) -> None:
        stamps = self._near.recv(4096)
        now = time.perf_counter_ns()
        for start in range(0, len(stamps) - _STAMP_BYTES + 1, _STAMP_BYTES):
            stamp = int.from_bytes(stamps[start : start + _STAMP_BYTES], "little")
            self.seen.append((now - stamp) / 1e9)
