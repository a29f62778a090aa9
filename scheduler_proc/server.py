"""Set-up of the scheduler process: runner, core and mailboxes, then the loop until drained.

Called by __main__.py through run_child. Makes no scheduling decisions.
"""

import gc
import logging

import zmq

from ..model_files.end_tokens import EndTokens, read_end_tokens
from ..wire import codec
from ..wire.channel import Mailbox, Outbox
from ..wire.child import ChildLife
from ..wire.config import SchedulerConfig
from ..wire.device_defaults import resolve_scheduling, step_sizes
from ..wire.messages import SchedulerInfo, SchedulerReady
from ..wire.scheduling_config import SchedulingConfig
from ..wire.slices import ask_for_usual_slices
from .core.intake import Limits
from .core.scheduler import Scheduler
from .event_loop import event_loop
from .kv_event_publisher import KVEventPublisher
from .loop_stamps import LoopStamps
from .ranks import Ranks
from .runner.facts import Runner
from .runner.loading import choose_device, choose_mode, make_model_runner
from .runner.rank_group import join

NEVER = (1 << 31) - 1  # gc threshold of the oldest generation: no automatic full collection

log = logging.getLogger(__name__)


def main(config: SchedulerConfig, life: ChildLife, ranks: Ranks) -> int:
    assert config.model.model is not None, "the launcher resolves the model to a path"
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    mailbox = Mailbox(context, config.links.scheduler, codec.to_scheduler())
    outbox = Outbox(context, config.links.detokenizer)
    ask_for_usual_slices()  # ZeroMQ's threads have started and keep short ones
    device = choose_device(config.execution.device)
    scheduling = resolve_scheduling(config.scheduling, device)
    if config.execution.tensor_parallel > 1:
        # Check before waiting for the ranks, which would exit with the same error first.
        choose_mode(config.execution, device, config.model.model, scheduling.page_size)
    shard = join(0, config.links.run_dir, config.execution)
    ends = read_end_tokens(config.model.model)  # before the weights: it may refuse the files
    runner = make_model_runner(config.model, scheduling, config.execution, config.lora, shard)
    _log_end_tokens(ends)
    info = _info(scheduling, runner, ends.ids)
    log.info("%s", step_sizes(scheduling))
    limits = Limits(
        vocab_size=info.vocab_size,
        context_length=info.context_length,
        pool_tokens=info.max_total_tokens,
        eos_token_ids=frozenset(ends.ids),
        max_loras=config.lora.max_loras_per_batch,
    )
    scheduler = Scheduler(scheduling, limits, runner.facts.num_pages)
    kv_events = _kv_events(context, scheduling)
    stamps = LoopStamps(context, config.links)
    outbox.send(SchedulerReady(info))
    stamps.start()
    life.ready()
    # A full collection walks the whole prefix tree and stalls every answer, a tenth of a second for
    # 100,000 nodes: the loop asks for one when it is idle.
    gc.set_threshold(*gc.get_threshold()[:2], NEVER)
    overlap = runner.facts.on_device and not config.execution.disable_overlap_schedule
    led, inbox = stamps.runner(ranks.lead(runner)), stamps.inbox(mailbox)
    event_loop(scheduler, led, inbox, outbox, kv_events, overlap=overlap)
    stamps.close()
    ranks.close()
    runner.loras.close()
    if kv_events is not None:
        kv_events.close()
    mailbox.close()
    outbox.close()
    context.term()
    return 0


def _log_end_tokens(ends: EndTokens) -> None:
    if ends.tokens:
        log.info("answers end with %s", "; ".join(map(str, ends.tokens)))
    else:
        log.warning("the model's files name no end token: answers end by their length")
    if ends.mistyped:
        log.warning(
            "the GGUF file types these tokens as ordinary text, which no text would ever become; "
            "each is taken as one token: %s",
            " ".join(ends.mistyped),
        )


def _kv_events(
    context: "zmq.Context[zmq.Socket[bytes]]", scheduling: SchedulingConfig
) -> KVEventPublisher | None:
    if scheduling.kv_events is None:
        return None
    return KVEventPublisher(context, scheduling.kv_events, scheduling.kv_events_replay)


def _info(scheduling: SchedulingConfig, runner: Runner, eos: tuple[int, ...]) -> SchedulerInfo:
    return SchedulerInfo(
        vocab_size=runner.facts.vocab_size,
        context_length=runner.facts.context_length,
        page_size=runner.facts.page_size,
        max_total_tokens=runner.facts.max_total_tokens,
        max_running_requests=scheduling.max_running_requests,
        chunked_prefill_size=scheduling.chunked_prefill_size,
        dtype=runner.facts.dtype_name,
        eos_token_ids=eos,
        kv_events=scheduling.kv_events,
        kv_events_replay=scheduling.kv_events_replay,
    )
