"""Fixtures of the whole-server tests: a server on the embedded model, and the oracle.

Servers run without any OMP setting, as a user starts them.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.mode import DTYPE
from e2e.oracle import Oracle
from support.server import Server, running_server, server_home


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle()


@pytest.fixture(scope="session")
def _shared_server() -> Iterator[Server]:
    with running_server("--dtype", DTYPE, "--kv-tokens", "16384") as server:
        yield server


@pytest.fixture
def server(_shared_server: Server) -> Iterator[Server]:
    """Server shared by all tests that only send requests; after each it must be idle."""
    yield _shared_server
    _shared_server.wait_until_idle()
    assert "Traceback" not in _shared_server.log


@pytest.fixture
def home() -> Iterator[Path]:
    """Directory for servers that run one after the other."""
    with server_home() as path:
        yield path
