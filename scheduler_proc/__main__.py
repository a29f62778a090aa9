"""`python -m tokenloom.scheduler_proc`: started by the launcher, its config on standard input."""

from ..wire.child import ChildLife, run_child
from ..wire.config import SchedulerConfig


def main(config: SchedulerConfig, life: ChildLife) -> int:
    from .server import main as serve  # torch comes in here, once the launcher is being watched

    return serve(config, life)


run_child("scheduler", SchedulerConfig, main)
