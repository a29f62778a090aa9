"""`python -m tokenloom.scheduler_proc`: started by the launcher, its config on standard input."""

import os

from ..wire.child import ChildLife, run_child
from ..wire.config import SchedulerConfig
from .ranks import Ranks


def main(config: SchedulerConfig, life: ChildLife) -> int:
    # Read once, when torch loads its OpenMP runtime: threads that wait must not spin, or they
    # take the cores from the processes that deal with text.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    ranks = Ranks(config, life)  # they import torch meanwhile
    from .server import main as serve  # torch comes in here, once the launcher is being watched

    return serve(config, life, ranks)


if __name__ == "__main__":
    run_child("scheduler", SchedulerConfig, main)
