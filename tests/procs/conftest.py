"""Starting real launchers over fake children, and making sure that nothing of them stays."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from tokenloom.wire.config import ModelConfig, RuntimeConfig, ServerConfig

DEADLINE_S = 20.0


class ServerSet:
    """One launcher with its fake children, which are known by their working directory."""

    def __init__(
        self,
        tmpdir: Path,
        runtime: RuntimeConfig,
        behaviours: dict[str, str],
        redirect: str = "",
        model_name: str = "fake-model",
    ) -> None:
        self.tmpdir = tmpdir
        self._home = Path(tempfile.mkdtemp(prefix="tl"))
        config = ServerConfig(
            model=ModelConfig(model="/fake", served_model_name=model_name), runtime=runtime
        )
        self.process = subprocess.Popen(
            [
                *("sh", "-c", f'exec "$@" {redirect}', "sh"),
                sys.executable,
                str(Path(__file__).with_name("fake_set.py")),
                msgspec.json.encode(config).decode(),
                *(f"{name}={behaviour}" for name, behaviour in behaviours.items()),
            ],
            cwd=self._home,
            env={**os.environ, "TMPDIR": str(tmpdir)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def serving_line(self) -> str:
        """Wait for the one line of standard output; the launcher's own deadline bounds it."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def end(self, seconds: float = DEADLINE_S) -> tuple[int, str]:
        """Wait for the launcher's end: its exit status and what it and the children logged."""
        _, logged = self.process.communicate(timeout=seconds)
        return self.process.returncode, logged

    def alive(self) -> dict[str, psutil.Process]:
        """The living children by name."""
        found = {}
        for process in psutil.process_iter():
            try:
                if process.pid == self.process.pid or process.cwd() != str(self._home):
                    continue
                if command := process.cmdline():  # empty while a process dies
                    found[_name(command)] = process
            except (psutil.NoSuchProcess, psutil.AccessDenied):  # gone, a zombie, or not ours
                continue
        return found

    def run_dirs(self) -> list[Path]:
        return list(self.tmpdir.iterdir())

    @staticmethod
    def wait_for(condition: Callable[[], object], seconds: float = DEADLINE_S) -> None:
        """Poll until true; fails at the deadline."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not true within {seconds} s"
            time.sleep(0.01)

    def clear(self) -> None:
        self.process.kill()
        for process in self.alive().values():
            process.kill()
        self.process.communicate()
        self._home.rmdir()


def _name(command: list[str]) -> str:
    """From the title that a child gives itself, or from its arguments before that."""
    title = command[0].partition("::")[2]
    return title or command[-2]


@pytest.fixture
def short_tmp() -> Iterator[Path]:
    """pytest's own tmp_path is too long for a socket in it."""
    path = Path(tempfile.mkdtemp(prefix="tl"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def start_set(short_tmp: Path) -> Iterator[Callable[..., ServerSet]]:
    """start_set(scheduler="crash at start", start_timeout=2.0): behaviours and runtime fields.

    `redirect` is what a shell makes of the launcher's standard streams.
    """
    started: list[ServerSet] = []

    def start(
        start_timeout: float = 20.0,
        drain_timeout: float = 20.0,
        tmpdir: Path = short_tmp,
        redirect: str = "",
        model_name: str = "fake-model",
        **names: str,
    ) -> ServerSet:
        runtime = RuntimeConfig(start_timeout=start_timeout, drain_timeout=drain_timeout)
        started.append(ServerSet(tmpdir, runtime, names, redirect, model_name))
        return started[-1]

    yield start
    for one in started:
        one.clear()
