"""Do the torch-free tests notice small changes of the core? `make mutants`, or some of its files:

    python -m mutation.run [FILE ...]

Each mutant lives in a forked process of its own, by a loader that gives its module other source:
no file is touched. It dies of a short simulation, of tests/core, or of a longer simulation; the
process that neither notices it nor hangs tells of a survivor. Survivors that cannot be told from
the original, or are meant to be free, stand with their reasons in docs/testing.md.
"""

import argparse
import importlib.machinery
import importlib.util
import os
import re
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from random import Random
from types import ModuleType

import hypothesis
import pytest
from mutation.mutants import Mutant, mutants_of

ROOT = Path(__file__).parent.parent.parent
CORE = ROOT / "scheduler_proc" / "core"
PACKAGE = "tokenloom.scheduler_proc.core"
TIMEOUT_S = 60  # of processor time; what is unchanged takes a third of it
SURVIVED, KILLED = 0, 1
TARGET = 0.95


class _MutantFinder(importlib.machinery.SourceFileLoader):
    """Finds one module, and loads it from the mutant's source."""

    def __init__(self, path: Path, source: str) -> None:
        super().__init__(f"{PACKAGE}.{path.stem}", str(path))
        self._source = source

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self) if name == self.name else None

    def get_code(self, fullname: str) -> object:  # type: ignore[override]
        return compile(self._source, self.path, "exec")


def survives(path: Path, mutant: Mutant) -> bool:
    child = os.fork()
    if child == 0:
        os._exit(_judge(path, mutant))
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == SURVIVED


def _judge(path: Path, mutant: Mutant) -> int:
    """In the child. Nothing of the core has been imported yet."""
    resource.setrlimit(resource.RLIMIT_CPU, (TIMEOUT_S, TIMEOUT_S))
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(1, 2)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # they take longer than some mutants
    sys.meta_path.insert(0, _MutantFinder(path, mutant.source))
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # nobody reads the failure
    hypothesis.settings.register_profile(
        "mutation", database=None, derandomize=True, phases=phases, report_multiple_bugs=False
    )
    hypothesis.settings.load_profile("mutation")
    try:
        _simulate("short", 1_000)
        quiet = ["-x", "-q", "--tb=no", "-p", "no:cacheprovider", "-W", "ignore"]
        # what the simulation does at length, the stateful test need not do again
        quiet += ["--ignore", str(ROOT / "tests" / "core" / "test_scheduler_stateful.py")]
        where = ["--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml")]
        tests = ROOT / "tests" / "core"
        own = tests / f"test_{path.stem}.py"  # likely to notice, so before all others
        if any(pytest.main([str(one), *quiet, *where]) for one in (own, tests) if one.exists()):
            return KILLED
        _simulate("long", 30_000)
    except BaseException:
        return KILLED
    return SURVIVED


def _simulate(seed: str, steps: int) -> None:
    from sim.flags import draw_setup
    from sim.run import History, play
    from sim.situations import Situations

    situations, number = Situations(), 0
    while situations.steps < steps:
        random = Random(f"{seed}/{number}")
        play(random, History(draw_setup(random), []), situations)
        number += 1


def accepted() -> set[str]:
    """Survivors that docs/testing.md gives a reason for."""
    page = ROOT / "docs" / "testing.md"
    rows = re.findall(r"^\| (`.+?`) \|", page.read_text(), re.MULTILINE)
    return {name for row in rows for name in re.findall(r"`(.+?)`", row)}


def _mutants(paths: Sequence[Path]) -> Iterator[tuple[Path, Mutant]]:
    for path in paths:
        yield from ((path, mutant) for mutant in mutants_of(path.read_text(), path.stem))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m mutation.run", description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, default=sorted(CORE.glob("*.py")))
    args = parser.parse_args(argv)
    known, started, killed, equivalent, new = accepted(), time.monotonic(), 0, 0, []
    mutants = list(_mutants([path.resolve() for path in args.files]))
    first = mutants[0][0]
    assert survives(first, Mutant("unchanged", 0, first.read_text())), "the tests fail unchanged"
    for path, mutant in mutants:
        if not survives(path, mutant):
            killed += 1
        elif mutant.name in known:
            equivalent += 1
        else:
            new.append(mutant)
            print(f"survives: {path.name}:{mutant.line}: {mutant.name}", flush=True)
    score = killed / max(1, killed + len(new))
    print(
        f"{len(mutants)} mutants in {time.monotonic() - started:.0f} s: {killed} killed, "
        f"{equivalent} survive with a reason, {len(new)} without: {score:.1%}"
    )
    return 0 if score >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
