"""What the whole-server tests share: one server on the embedded model in float32, and the oracle.

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
    """Shared by all tests that only ask; after each of them nothing may be held any more."""
    yield _shared_server
    _shared_server.wait_until_idle()
    assert "Traceback" not in _shared_server.log


@pytest.fixture
def home() -> Iterator[Path]:
    """For servers that follow each other in one place."""
    with server_home() as path:
        yield path
