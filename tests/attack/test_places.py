"""Bad places to start in: served as far as it goes, or refused in words, never a traceback."""

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from attack.conftest import FLAGS
from attack.witness import connect, is_healthy
from support.server import PATIENCE_S, server_home, started_server, wait_for

pytestmark = pytest.mark.attack

SERVE = [sys.executable, "-m", "tokenloom", "serve", *FLAGS]


@pytest.fixture
def home() -> Iterator[Path]:
    with server_home() as path:
        yield path


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


def environment(**changes: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key != "XDG_RUNTIME_DIR"}
    return kept | changes


def start_fails(*flags: str, files: int | None = None, **changes: str) -> tuple[int, str]:
    """Exit status and standard error of a start that cannot succeed."""
    ended = subprocess.run(
        [*SERVE, *flags],
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        preexec_fn=None if files is None else limited(files),
    )
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, ended.stderr


def limited(files: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))


@contextmanager
def files_limited(files: int) -> Iterator[None]:
    """What is started in the block may open so many; the limit is inherited."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("redirect", [">&- 2>&-", ">/dev/full 2>&1", "<&- >&- 2>&-"])
def test_nobody_takes_what_it_says(home: Path, free_port: int, redirect: str) -> None:
    """It serves and drains without standard streams, or with a full disk behind them."""
    command = ["sh", "-c", f'exec "$@" {redirect}', "sh", *SERVE, "--port", str(free_port)]
    url = f"http://127.0.0.1:{free_port}"
    process = subprocess.Popen(command, env=environment(TMPDIR=str(home)), start_new_session=True)
    try:
        wait_for(lambda: answers(f"{url}/health") or process.poll() is not None, every=0.1)
        body = {"text": "hi", "sampling_params": {"max_new_tokens": 2}}
        for _ in range(50):
            assert httpx.post(f"{url}/generate", json=body, timeout=60).status_code == 200
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    finally:
        process.kill()
        process.wait()
    assert not list(home.glob("tokenloom-run-*"))


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def test_few_files(home: Path) -> None:
    """With 64 files it serves; a hundred silent connections leave room for one more."""
    with files_limited(64), started_server(*FLAGS, home=home) as server:
        server.wait_until_serving()
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
        held = [connect(server) for _ in range(100)]
        assert is_healthy(server)
        assert server.generate("hi", max_new_tokens=2)["output_ids"]
        for one in held:
            one.close()
        assert is_healthy(server)
        assert server.stop() == 0


def test_too_few_files(home: Path) -> None:
    status, said = start_fails(files=24, TMPDIR=str(home))
    assert status != 0
    assert "24 files may be open (ulimit -n)" in said


def test_a_port_that_is_taken(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, said = start_fails("--port", str(port), TMPDIR=str(home))
    assert status == 1
    assert f"cannot listen on 127.0.0.1:{port}" in said


@pytest.mark.parametrize("variable", ["TMPDIR", "XDG_RUNTIME_DIR"])
def test_a_folder_whose_name_is_too_long_for_sockets(home: Path, variable: str) -> None:
    long = home / ("t" * 90)
    long.mkdir()
    status, said = start_fails("--port", "0", **{"TMPDIR": str(home), variable: str(long)})
    assert status == 1
    assert "socket path" in said
    assert not list(home.glob("**/tokenloom-run-*"))


def test_a_runtime_folder_that_is_missing(home: Path) -> None:
    """It is made."""
    with started_server(*FLAGS, home=home) as server:
        assert server.wait_until_serving()
        assert server.stop() == 0


@pytest.mark.parametrize("what", ["link", "open to all"])
def test_a_door_folder_that_somebody_else_made(home: Path, what: str) -> None:
    folder = home / f"tokenloom-{os.geteuid()}"
    if what == "link":
        (home / "elsewhere").mkdir()
        folder.symlink_to(home / "elsewhere")
    else:
        folder.mkdir()
        folder.chmod(0o777)
    status, said = start_fails("--port", "0", TMPDIR=str(home))
    assert status == 1
    assert str(folder) in said


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--socket", "ipc:///etc/hostname"), "/etc/hostname exists and is not a socket"),
        (("--socket", "tcp://0.0.0.0:34699"), "--allow-unauthenticated-network"),
        (("--host", "0.0.0.0"), "--allow-unauthenticated-network"),
        (("--host", "::"), "--allow-unauthenticated-network"),
        (("--model", "/dev/null"), "/dev/null"),
        (("--model", "/dev/zero"), "/dev/zero"),
    ],
)
def test_addresses_and_models_that_are_none(home: Path, flags: tuple[str, ...], words: str) -> None:
    status, said = start_fails("--port", "0", *flags, TMPDIR=str(home))
    assert status in (1, 2)
    assert words in said
