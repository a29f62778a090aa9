"""The Python files of the repository, for the tests of its rules."""

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
NOT_SOURCE = {"setup.py", "tests", "docs", "examples", "build", "dist"}


def all_files() -> list[Path]:
    """Return every .py file, tests included, except below folders with a leading dot."""
    return sorted(_walk())


def source_files() -> list[Path]:
    """Return the files of the distribution."""
    return [path for path in all_files() if path.relative_to(ROOT).parts[0] not in NOT_SOURCE]


def _walk() -> Iterator[Path]:
    for folder, subfolders, names in os.walk(ROOT):
        # Prune early: a virtual environment holds ten thousand files.
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        for name in names:
            if name.endswith(".py"):
                yield Path(folder, name)
