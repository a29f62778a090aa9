"""A fresh server for each module of attacks, on the embedded model, with a folder for adapters."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.server import Server, running_server

FLAGS = ("--dtype", "int4", "--kv-tokens", "24000")


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def server(adapters: Path) -> Iterator[Server]:
    with running_server(*FLAGS, "--lora-root", str(adapters)) as server:
        yield server
