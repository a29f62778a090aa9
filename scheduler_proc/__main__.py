"""`python -m tokenloom.scheduler_proc`: started by the launcher, its config on standard input."""

import os

from ..wire.child import ChildLife, run_child
from ..wire.config import SchedulerConfig
from .ranks import Ranks


def main(config: SchedulerConfig, life: ChildLife) -> int:
    # Read once, when torch loads its OpenMP runtime. Waiting threads must not spin, or they take
    # the cores from the front and the detokenizer.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    ranks = Ranks(config, life)  # started first, so that they import torch in parallel
    from .server import main as serve  # imports torch, after the watch on the launcher

    return serve(config, life, ranks)


if __name__ == "__main__":
    run_child("scheduler", SchedulerConfig, main)
