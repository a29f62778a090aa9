"""Handlers for health, model and server information, and cache control."""

import asyncio
from importlib.metadata import version

import msgspec

from ...wire.messages import SchedulerInfo
from ...wire.sampling import InvalidRequest
from ..errors import Refused
from ..front import Front
from ..limits import STATS_SECONDS
from .asgi import Exchange
from .errors import retry_after

VERSION = version("tokenloom")


class Health(msgspec.Struct, frozen=True, omit_defaults=True):
    status: str
    reason: str | None = None


class Flushed(msgspec.Struct, frozen=True):
    pages: int
    success: bool = True


class ModelInfo(msgspec.Struct, frozen=True):
    """Model facts; `model_path` is the served name, which gateways use as the model's name."""

    model_path: str
    served_model_name: str
    tokenizer_path: str
    is_generation: bool = True


class SchedulerNumbers(msgspec.Struct, frozen=True):
    """wire.messages.StatsOut as a JSON object."""

    step: int
    running: int
    waiting: int
    used_tokens: int
    evictable_tokens: int
    free_tokens: int
    free_rows: int
    new_token_ratio: float
    retractions_total: int
    prompt_tokens_total: int
    cached_tokens_total: int
    generated_tokens_total: int
    violations_total: int
    evicted_pages_total: int
    tree_nodes: int
    tree_pages: int
    detokenizer_strays_total: int


class InternalState(msgspec.Struct, frozen=True):
    effective_max_running_requests_per_dp: int


class ServerInfo(msgspec.Struct, frozen=True):
    """Server facts, under SGLang's names where it has them; null while the model loads."""

    version: str
    status: str
    model_path: str
    served_model_name: str
    vocab_size: int | None
    context_length: int | None
    page_size: int | None
    max_total_num_tokens: int | None
    max_running_requests: int | None
    chunked_prefill_size: int | None
    dtype: str | None
    internal_states: list[InternalState]
    front: "FrontNumbers"
    scheduler: SchedulerNumbers | None  # null when the scheduler did not answer in time
    kv_events: "KVEvents | None"  # null: off, or not over TCP
    dp_size: int = 1


class KVEvents(msgspec.Struct, frozen=True):
    """Where subscribers find the KV events, in SGLang's form."""

    endpoint_host: str
    endpoint_port_base: int
    block_size: int
    replay_endpoint_port_base: int | None
    publisher: str = "zmq"
    topic: str = ""
    dp_size: int = 1


class FrontNumbers(msgspec.Struct, frozen=True):
    requests_in_flight: int
    late_rows_total: int
    strays_total: int  # messages and frames from other processes that were dropped


def _status(front: Front) -> str:
    if front.draining:
        return "draining"
    if front.health.problem is not None:
        return "stuck"
    return "ready" if front.ready else "loading"


async def live(front: Front, exchange: Exchange) -> None:
    """Answer 200 as long as the front runs, whatever the other processes do."""
    await exchange.reply(200, Health("alive"))


async def health(front: Front, exchange: Exchange) -> None:
    """Answer whether the server is ready, from what the front knows; sends no message."""
    try:
        _require_progress(front)
    except Refused as refused:
        answer = Health(_status(front), front.health.problem)
        await exchange.reply(refused.status, answer, retry_after(refused))
    else:
        await exchange.reply(200, Health(_status(front)))


async def health_generate(front: Front, exchange: Exchange) -> None:
    """Answer after generating one token; if other requests are in flight, at once."""
    _require_progress(front)
    if front.in_flight == int(front.health.probe.running):
        async with exchange.connected():
            await front.health.probe.one_token()
    await exchange.reply(200, Health("ready"))


def _require_progress(front: Front) -> None:
    front.require_ready()
    if front.health.problem is not None:
        raise Refused(503, front.health.problem)


async def flush_cache(front: Front, exchange: Exchange) -> None:
    given = exchange.query("timeout")
    try:
        timeout = 0.0 if given is None else float(given)
    except ValueError:
        raise InvalidRequest("timeout", "timeout must be a number of seconds") from None
    await exchange.read_body()  # its contents are ignored
    async with exchange.connected():
        pages = await front.flush_cache(timeout)
    await exchange.reply(200, Flushed(pages))


async def model_info(front: Front, exchange: Exchange) -> None:
    name = front.model_name
    await exchange.reply(200, ModelInfo(name, name, name))


async def server_info(front: Front, exchange: Exchange) -> None:
    info = front.info
    await exchange.reply(
        200,
        ServerInfo(
            version=VERSION,
            status=_status(front),
            model_path=front.model_name,
            served_model_name=front.model_name,
            vocab_size=None if info is None else info.vocab_size,
            context_length=None if info is None else info.context_length,
            page_size=None if info is None else info.page_size,
            max_total_num_tokens=None if info is None else info.max_total_tokens,
            max_running_requests=None if info is None else info.max_running_requests,
            chunked_prefill_size=None if info is None else info.chunked_prefill_size,
            dtype=None if info is None else info.dtype,
            internal_states=_internal_states(info),
            front=FrontNumbers(front.in_flight, front.late_rows, front.strays.total),
            scheduler=await _scheduler_numbers(front),
            kv_events=None if info is None else _kv_events(info),
        ),
    )


def _kv_events(info: SchedulerInfo) -> KVEvents | None:
    events, replay = _tcp(info.kv_events), _tcp(info.kv_events_replay)
    return events and KVEvents(*events, info.page_size, replay and replay[1])


def _tcp(endpoint: str | None) -> tuple[str, int] | None:
    """Return host and port of a tcp:// endpoint; None for any other."""
    if endpoint is None or not endpoint.startswith("tcp://"):
        return None
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return (host.rpartition("@")[2], int(port)) if port.isdigit() else None


def _internal_states(info: SchedulerInfo | None) -> list[InternalState]:
    return [] if info is None else [InternalState(info.max_running_requests)]


async def _scheduler_numbers(front: Front) -> SchedulerNumbers | None:
    if front.info is None:
        return None
    try:
        async with asyncio.timeout(STATS_SECONDS):
            stats = await front.stats()
    except TimeoutError:
        return None
    return msgspec.convert(stats, SchedulerNumbers, from_attributes=True)
