"""Deliver RequestStreams as an HTTP answer, whole or as events; shared by all routes.

Owns the streams once submitted and always closes them, so a client that leaves becomes an AbortReq
at once. One task per prompt, none per token.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from ...wire.messages import StrOut
from ..front import RequestStream
from .asgi import Exchange, event
from .errors import ApiError, ClientGone, as_api_error, of_finish
from .intake import close_all
from .tally import Tally

log = logging.getLogger(__name__)


class Rendering(Protocol):
    """How a route renders its answers; one object per HTTP request."""

    def whole(self, tallies: Sequence[Tally]) -> msgspec.Struct | Sequence[msgspec.Struct]: ...

    def frames(self, index: int, tally: Tally, row: StrOut) -> bytes: ...

    def last_frames(self, tallies: Sequence[Tally]) -> bytes: ...


async def deliver(
    exchange: Exchange, streams: list[RequestStream], rendering: Rendering, *, as_events: bool
) -> None:
    """Send the output of the streams, inside `exchange.connected()`.

    Raises ApiError while no status line was sent.
    """
    tallies = [Tally(stream.prompt_tokens) for stream in streams]
    try:
        if as_events:
            await _send_events(exchange, streams, tallies, rendering)
        else:
            await _each(streams, tallies, _collect)
            await exchange.reply(200, rendering.whole(tallies))
    finally:
        close_all(streams)


async def _collect(index: int, stream: RequestStream, tally: Tally) -> None:
    async for row in stream:
        tally.add(row)
        _raise_failure(row)


async def _send_events(
    exchange: Exchange, streams: list[RequestStream], tallies: list[Tally], rendering: Rendering
) -> None:
    async def pump(index: int, stream: RequestStream, tally: Tally) -> None:
        async for row in stream:
            tally.add(row)
            _raise_failure(row)
            frames = rendering.frames(index, tally, row)
            if frames:
                await exchange.send_events(frames)

    try:
        await _each(streams, tallies, pump)
        last = rendering.last_frames(tallies)
    except ClientGone:
        raise
    except Exception as error:
        if not exchange.started:
            raise
        last = event(told(error).body)
    await exchange.end_events(last)


async def _each(
    streams: list[RequestStream],
    tallies: list[Tally],
    work: Callable[[int, RequestStream, Tally], Awaitable[None]],
) -> None:
    """Run `work` for all streams concurrently; the first failure cancels the rest and is raised."""
    if len(streams) == 1:
        await work(0, streams[0], tallies[0])
        return

    async def one(index: int) -> None:
        await work(index, streams[index], tallies[index])

    try:
        async with asyncio.TaskGroup() as group:
            for index in range(len(streams)):
                group.create_task(one(index))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


def _raise_failure(row: StrOut) -> None:
    if row.finish is not None and row.finish.reason == "error":
        raise of_finish(row.finish)


def told(error: Exception) -> ApiError:
    """Convert an exception to the client's error; log what must not reach the client."""
    answer = as_api_error(error)
    if answer.status == 500 and answer is not error:
        log.error("a request failed unexpectedly", exc_info=error)
    return answer
