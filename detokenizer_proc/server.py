"""The detokenizer process: turns ids from the scheduler into text for the front.

Run by `__main__`. Owns the mailbox and the `streams` of all requests; messages that are not token
ids pass through in order. Requests and HTTP must not enter.
"""

import logging
from collections.abc import Callable, Sequence

import msgspec
import uvloop
import zmq
import zmq.asyncio

from ..model_files.tokenizer import load_tokenizer
from ..wire import codec
from ..wire.channel import AsyncMailbox, Outbox
from ..wire.child import ChildLife
from ..wire.config import DetokenizerConfig, Links
from ..wire.messages import (
    BatchStrOut,
    BatchTokenIDOut,
    Drained,
    Draining,
    StatsOut,
    ToDetokenizer,
)
from .streams import Streams

log = logging.getLogger(__name__)


def main(config: DetokenizerConfig, life: ChildLife) -> int:
    """Run the process; return 0 after the scheduler has drained. Raises ModelError."""
    if config.model.model is None:
        raise ValueError("the launcher resolves the model before it starts this process")
    uvloop.run(serve(config.links, model_streams(config.model.model), life.ready))
    return 0


def model_streams(path: str) -> Streams:
    """Build Streams on the tokenizer of the model at `path`. Raises ModelError."""
    tokenizer = load_tokenizer(path)
    added = tokenizer.get_added_tokens_decoder().items()
    special = {token_id: token.content for token_id, token in added if token.special}

    def decode(ids: Sequence[int], skip_special_tokens: bool) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)

    return Streams(decode, special)


async def serve(links: Links, streams: Streams, ready: Callable[[], None]) -> None:
    """Turn ids into text until Drained arrives; call `ready` when the mailbox is bound."""
    context = zmq.asyncio.Context()
    plain: zmq.Context[zmq.Socket[bytes]] = zmq.Context.shadow(context.underlying)
    mailbox = AsyncMailbox(context, links.detokenizer, codec.to_detokenizer())
    front, scheduler = Outbox(plain, links.front), Outbox(plain, links.scheduler)
    ready()
    try:
        await _serve(mailbox, front, scheduler, streams)
    finally:
        for end in (mailbox, front, scheduler):
            end.close()
        context.term()  # waits until all messages are sent


async def _serve(
    mailbox: "AsyncMailbox[ToDetokenizer]", front: Outbox, scheduler: Outbox, streams: Streams
) -> None:
    draining = False
    while True:
        for message in await mailbox.receive():
            match message:
                case BatchTokenIDOut(rows):
                    outcome = streams.take(rows)
                    for word in outcome.to_scheduler:
                        scheduler.send(word)
                    if outcome.rows:
                        front.send(BatchStrOut(outcome.rows))
                case Draining():
                    draining = True
                case Drained() if not draining:
                    mailbox.strays.drop_message(message)  # must not end this process
                case Drained():
                    log.debug("drained; %d rows had no stream", streams.unknown_rows)
                    front.send(message)
                    return
                case StatsOut():
                    dropped = mailbox.strays.total + streams.unknown_rows
                    front.send(msgspec.structs.replace(message, detokenizer_strays_total=dropped))
                case _:  # control messages pass through in order
                    front.send(message)
