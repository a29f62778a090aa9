"""`python -m tokenloom.scheduler_proc.rank N`: one rank of a tensor-parallel model.

Started by ranks.py with the scheduler's config on standard input. It loads its share of the model
and runs each step it receives until the scheduler process is gone. Makes no decisions.
"""

import gc
import logging
import os
import sys

import zmq

from ..wire.child import ChildLife, run_child
from ..wire.config import SchedulerConfig
from ..wire.device_defaults import resolve_scheduling
from ..wire.slices import ask_for_usual_slices
from . import batch_codec


def main(config: SchedulerConfig, _: ChildLife) -> int:
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as in __main__.py
    from .runner.loading import choose_device, make_model_runner
    from .runner.rank_group import join

    if config.log_level == "info":
        logging.getLogger().setLevel(logging.WARNING)  # rank 0 logs the same lines
    rank = int(sys.argv[1])
    inbox = _inbox(config.links.rank(rank))
    ask_for_usual_slices()
    shard = join(rank, config.links.run_dir, config.execution)
    scheduling = resolve_scheduling(config.scheduling, choose_device(config.execution.device))
    runner = make_model_runner(config.model, scheduling, config.execution, config.lora, shard)
    gc.collect()
    gc.freeze()  # a garbage collection in one rank would stall all; see ChildLife.ready
    while True:
        runner.launch(batch_codec.decode(inbox.recv()))


def _inbox(address: str) -> "zmq.Socket[bytes]":
    """Bind the rank's socket, unbounded: a lost or refused frame would stall all ranks."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox = context.socket(zmq.PULL)
    inbox.setsockopt(zmq.RCVHWM, 0)
    inbox.bind(address)
    return inbox


if __name__ == "__main__":
    run_child(f"rank{sys.argv[1]}", SchedulerConfig, main)
