"""`python -m tokenloom.tokenizer_proc`: the front process, started by the launcher."""

from ..wire.child import FRONT, ChildLife, run_child
from ..wire.config import FrontConfig


def main(config: FrontConfig, life: ChildLife) -> int:
    from .server import run  # heavy import, after the watch on the launcher has started

    return run(config, life)


if __name__ == "__main__":
    run_child(FRONT, FrontConfig, main)
