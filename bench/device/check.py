"""The device check itself: which sections there are, their time, what is printed and written.

`python bench/device_check.py` runs this where a GPU is; tests run its sections on a stand-in.
"""

import argparse
import contextlib
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec
import psutil
import torch

from ...scheduler_proc.runner.device import CudaDevice
from ..report import as_json
from .attention import attention, other_attention
from .equality import equality
from .kernels import kernels
from .lab import Lab
from .overlap import loop
from .peers import transformers_peer
from .results import Report, SectionResult, as_text, missed
from .rig import CudaTimer, Rig
from .sections import Course, Section
from .server import server
from .sizes import Sizes
from .steps import decode, environment, lora, prefill

TOTAL_SECONDS = 350.0  # with what importing and ending take, six minutes
# Those that cannot be cut short stand last.
SECTIONS: tuple[tuple[str, float, Callable[[Lab, Report], None]], ...] = (
    ("environment", 10, environment),
    ("kernels", 50, kernels),
    ("graph = eager", 45, equality),
    ("attention", 15, attention),
    ("decode", 55, decode),
    ("prefill", 10, prefill),
    ("loop", 25, loop),
    ("adapters", 40, lora),
    ("transformers", 15, transformers_peer),
    ("server", 50, server),
    ("other attention", 35, other_attention),
)


class Outcome(msgspec.Struct, frozen=True):
    machine: dict[str, str]
    sections: list[SectionResult]
    missed_aims: list[str]


def sections(lab: Lab, only: Sequence[str] = ()) -> list[Section]:
    """Return all sections, or the named ones and the first, which measures the rates."""
    wanted = {SECTIONS[0][0], *only} if only else {name for name, *_ in SECTIONS}
    return [
        Section(name, seconds, partial(run, lab))
        for name, seconds, run in SECTIONS
        if name in wanted
    ]


def conclude(results: list[SectionResult], machine: dict[str, str], file: Path | None) -> int:
    """Print the table and write the JSON; the exit status: 1 if a section failed."""
    short = missed(results)
    if file is not None:
        file.write_bytes(as_json(Outcome(machine, results, short)))
    print(as_text(results))
    print(f"aims missed: {', '.join(short) or 'none of those measured'}", flush=True)
    return 1 if any(result.status == "failed" for result in results) else 0


def main(argv: list[str]) -> int:
    options = _parse(argv)
    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no CUDA device", file=sys.stderr)
        return 2
    machine = _machine()
    print(machine, flush=True)
    lab = Lab(Rig(CudaDevice(), CudaTimer()), Sizes())

    def note(results: list[SectionResult]) -> None:
        """Write the results so far, in case a later section hangs."""
        print(as_text(results[-1:]), flush=True)
        if options.json is not None:
            options.json.write_bytes(as_json(Outcome(machine, results, missed(results))))

    course = Course(options.seconds, note)
    with alarm(course, options.seconds, machine, options.json):
        results = course.play(sections(lab, options.only))
    print()
    return conclude(results, machine, options.json)


@contextlib.contextmanager
def alarm(
    course: Course, seconds: float, machine: dict[str, str], file: Path | None
) -> Iterator[None]:
    """End the process with the results so far: nothing less stops a hanging kernel."""

    def end() -> None:
        status = conclude(course.cut_short(), machine, file)
        for child in psutil.Process().children(recursive=True):  # a server holds the device
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        os._exit(status)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _machine() -> dict[str, str]:
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "memory": f"{properties.total_memory / 2**30:.0f} GiB",
        "multiprocessors": str(properties.multi_processor_count),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench/device_check.py",
        description="Check and measure everything that needs a GPU, with dummy weights.",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument(
        "--only", action="append", default=[], choices=[name for name, *_ in SECTIONS],
        help="a section to run; may be repeated (default: all)",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="for all of it")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
