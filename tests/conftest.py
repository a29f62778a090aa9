"""How the kernels are run in tests, and which tests run only when they are asked for.

Triton's kernels are interpreted, the native CPU library's come from any build.

Triton reads its environment when a kernel is defined, so it is set before anything is imported.

`--native-library FILE`: run the tests against another build of the native CPU library. For builds
with sanitizers (`make sanitize`). The file stands in for the installed extension in the import
system, where kernels/cpu/native.py looks it up: no shipped code knows of the exchange.
"""

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

os.environ["TRITON_INTERPRET"] = "1"

if importlib.util.find_spec("triton") is None:  # there are no wheels but for Linux
    collect_ignore_glob = [
        "bench/test_device_*.py",
        "kernels/test_cuda_*.py",
        "kernels/test_kernel_resources.py",
    ]

EXTENSION = "tokenloom.kernels.cpu._native"


class _Exchange(importlib.abc.MetaPathFinder):
    def __init__(self, library: Path) -> None:
        self._library = library

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != EXTENSION:
            return None
        return importlib.util.spec_from_file_location(name, self._library)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--native-library", type=Path, metavar="FILE", help="instead of the installed")


def pytest_configure(config: pytest.Config) -> None:
    library = config.getoption("--native-library")
    if library is None:
        return
    if not library.is_file():
        raise pytest.UsageError(f"--native-library: there is no {library}")
    sys.meta_path.insert(0, _Exchange(library.resolve()))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave attacks out unless the marker is asked for: they take many minutes."""
    if "attack" in config.option.markexpr:
        return
    attacks = [item for item in items if item.get_closest_marker("attack")]
    if attacks:
        config.hook.pytest_deselected(items=attacks)
        items[:] = [item for item in items if item not in attacks]


def pytest_report_header(config: pytest.Config) -> str | None:
    if config.getoption("--native-library") is None:
        return None
    found = importlib.util.find_spec(EXTENSION)
    return f"native library: {found and found.origin}"
