"""Stands in for a tokenizer_proc, scheduler_proc or detokenizer_proc: no model, the same life.

usage: fake_child.py NAME BEHAVIOUR. The well-behaved ones pass a drain along the ring as the real
ones do.
"""

import os
import signal
import sys
import threading

import zmq

from tokenloom.wire import codec
from tokenloom.wire.channel import Mailbox, Outbox
from tokenloom.wire.child import ChildLife, run_child
from tokenloom.wire.config import DetokenizerConfig, FrontConfig, SchedulerConfig
from tokenloom.wire.messages import ChildDied, Drained, DrainReq, ToFront

NAME, BEHAVIOUR = sys.argv[1:]
CONFIG_TYPES: dict[str, type[FrontConfig | SchedulerConfig | DetokenizerConfig]] = {
    "tokenizer": FrontConfig,
    "scheduler": SchedulerConfig,
    "detokenizer": DetokenizerConfig,
}


class Refusal(ValueError):
    pass


Refusal.__module__ = "tokenloom.fake"  # as an error class of the package would be


def main(config: FrontConfig | SchedulerConfig | DetokenizerConfig, life: ChildLife) -> int:
    before_ready()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    links = config.links
    if NAME == "tokenizer":
        asked = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: asked.set())
        front = Mailbox(context, links.front, codec.to_front())
        scheduler = Outbox(context, links.scheduler)
        life.ready("http://fake:1")
        after_ready()
        while not asked.is_set():
            if died := front.receive(50):
                return say_farewell(died)
        scheduler.send(DrainReq())
        last = front.receive(None)
        if last != [Drained()]:
            return say_farewell(last)
        return 0
    if NAME == "scheduler":
        mailbox = Mailbox(context, links.scheduler, codec.to_scheduler())
        detokenizer = Outbox(context, links.detokenizer)
        life.ready()
        after_ready()
        assert mailbox.receive(None) == [DrainReq()]
        in_drain()
        detokenizer.send(Drained())
        return 0
    inbox = Mailbox(context, links.detokenizer, codec.to_detokenizer())
    front_box = Outbox(context, links.front)
    life.ready()
    after_ready()
    assert inbox.receive(None) == [Drained()]
    front_box.send(Drained())
    return 0


def say_farewell(heard: list[ToFront]) -> int:
    """What a front does when it hears of a death."""
    assert all(isinstance(message, ChildDied) for message in heard), heard
    if BEHAVIOUR == "deaf":
        threading.Event().wait()
    print(f"heard {heard}", file=sys.stderr, flush=True)
    return 1


def before_ready() -> None:
    match BEHAVIOUR:
        case "refuse":
            raise Refusal("this model is no model")
        case "crash at start":
            raise RuntimeError("broken on purpose")
        case "exit at start":
            sys.exit(7)
        case "never ready":
            threading.Event().wait()
        case "stop launcher at start":
            os.kill(os.getppid(), signal.SIGTERM)
            threading.Event().wait()
        case "hold the interpreter":
            sum(range(1 << 62))  # a C loop that lets no other thread run


def after_ready() -> None:
    match BEHAVIOUR:
        case "crash when ready":
            raise RuntimeError("broken on purpose")
        case "leave when ready":
            os._exit(0)
        case "stop launcher when ready":
            os.kill(os.getppid(), signal.SIGTERM)


def in_drain() -> None:
    match BEHAVIOUR:
        case "stuck in drain":
            threading.Event().wait()
        case "crash in drain":
            raise RuntimeError("broken on purpose")


if BEHAVIOUR == "stop launcher at once":
    os.kill(os.getppid(), signal.SIGTERM)
run_child(NAME, CONFIG_TYPES[NAME], main)
