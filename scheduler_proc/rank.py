"""`python -m tokenloom.scheduler_proc.rank N`: one rank of a model that is spread over several.

Started by ranks.py, its config on standard input like the scheduler's own. It decides nothing: it
loads its share and runs the steps that it is sent until the scheduler process is gone.
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
        logging.getLogger().setLevel(logging.WARNING)  # the first rank says the same
    rank = int(sys.argv[1])
    inbox = _inbox(config.links.rank(rank))
    ask_for_usual_slices()
    shard = join(rank, config.links.run_dir, config.execution)
    scheduling = resolve_scheduling(config.scheduling, choose_device(config.execution.device))
    runner = make_model_runner(config.model, scheduling, config.execution, config.lora, shard)
    gc.collect()
    gc.freeze()  # as ChildLife.ready does: all ranks wait for the one that looks for garbage
    while True:
        runner.launch(batch_codec.decode(inbox.recv()))


def _inbox(address: str) -> "zmq.Socket[bytes]":
    """Frames of any size: the scheduler is believed, and a lost one would stop all ranks."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox = context.socket(zmq.PULL)
    inbox.setsockopt(zmq.RCVHWM, 0)
    inbox.bind(address)
    return inbox


if __name__ == "__main__":
    run_child(f"rank{sys.argv[1]}", SchedulerConfig, main)
