"""A real server for the tests: `python -m tokenloom serve` as a user starts it.

Each server has its own home: the working directory by which its processes are found, and the TMPDIR
of its sockets. Leaving `running_server` stops it and checks that nothing is left.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

CHILDREN = {"tokenizer", "scheduler", "detokenizer"}
# Generous, since the machine may be busy: a deadline only detects hangs.
PATIENCE_S = 300.0
GONE_S = 5.0  # until every process of a server must have ended
_SERVING = "tokenloom is serving "


def wait_for(
    condition: Callable[[], Any], seconds: float = PATIENCE_S, *, every: float = 0.01
) -> Any:  # noqa: ANN401
    """Poll until the condition is true and return its value; fail after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"not true within {seconds} s"
        time.sleep(every)
    return value


class Server:
    """One launcher with its children. Consecutive servers may share `home`."""

    def __init__(self, home: Path, *flags: str) -> None:
        self.home = home
        self._seen: dict[psutil.Process, str] = {}
        self._earlier = set(_run_dirs(home))
        self.url = ""
        self.http = httpx.Client(timeout=PATIENCE_S)
        self._cwd = Path(tempfile.mkdtemp(prefix="cwd", dir=home))
        self._stderr = self._cwd / "log"
        kept = {key: os.environ[key] for key in os.environ if key != "XDG_RUNTIME_DIR"}
        with self._stderr.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tokenloom", "serve", *_flags(flags)],
                cwd=self._cwd,
                env=kept | {"TMPDIR": str(home)},
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,  # a process group, as a terminal would make
            )

    def wait_until_serving(self) -> Self:
        """Read the one line of standard output; the launcher's own deadline bounds the wait."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith(_SERVING), f"no server came up:\n{self.log}"
        self.url = line.partition(" at ")[2].split()[0]
        return self

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def door(self) -> str:
        """Address of the socket door."""
        return f"ipc://{self.home}/tokenloom-{os.geteuid()}/port-{self.port}.sock"

    @property
    def log(self) -> str:
        return self._stderr.read_text()

    # -- requests

    def info(self) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(f"{self.url}/get_server_info").json()
        return found

    def stats(self) -> dict[str, Any]:
        """Return the scheduler's numbers; retry while it is too busy to answer."""
        return wait_for(lambda: self.info()["scheduler"])

    def post(self, route: str, **body: object) -> Any:  # noqa: ANN401
        """Return the JSON of an answer, which must be a 200."""
        answer = self.http.post(f"{self.url}{route}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def generate(self, prompt: str | list[int], **sampling: object) -> Any:  # noqa: ANN401
        """Call /generate, greedy by default."""
        name = "text" if isinstance(prompt, str) else "input_ids"
        return self.post(
            "/generate", **{name: prompt, "sampling_params": {"temperature": 0.0, **sampling}}
        )

    def stream(self, prompt: str | list[int], **sampling: object) -> "Stream":
        return Stream(self.url, prompt, {"temperature": 0.0, **sampling})

    def wait_until_idle(self) -> dict[str, Any]:
        """Wait until no request, page or row is held; return the scheduler's numbers."""

        def idle() -> dict[str, Any] | None:
            info = self.info()
            stats = info["scheduler"]
            if info["front"]["requests_in_flight"] or not stats:
                return None
            return None if stats["running"] or stats["waiting"] else stats

        stats: dict[str, Any] = wait_for(idle)
        assert stats["used_tokens"] == 0
        assert stats["free_rows"] == self.info()["max_running_requests"]
        assert stats["violations_total"] == 0
        return stats

    # -- its processes

    def alive(self) -> dict[str, psutil.Process]:
        """Return all live processes by name, the launcher and orphans included.

        An exiting process has no working directory, so each one seen is remembered until it is gone
        or a zombie.
        """
        for process in psutil.process_iter():
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):  # gone, or not ours
                if process.cwd() == str(self._cwd) and (command := process.cmdline()):
                    self._seen[process] = _name(command)
        return {name: process for process, name in self._seen.items() if _lives(process)}

    def child(self, name: str) -> psutil.Process:
        """Wait for the process with that name and return it."""
        process: psutil.Process = wait_for(lambda: self.alive().get(name))
        return process

    def run_dirs(self) -> list[Path]:
        """Return the run directories made since this server started; one while it runs."""
        return [path for path in _run_dirs(self.home) if path not in self._earlier]

    # -- its end

    def stop(self, signum: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(signum)
        return self.end()

    def end(self, seconds: float = PATIENCE_S) -> int:
        """Wait for the launcher to exit; return its exit status."""
        return self.process.wait(seconds)

    def assert_nothing_lives(self) -> None:
        wait_for(lambda: not self.alive(), GONE_S)

    def clear(self) -> None:
        """Kill what still runs; print the log, which pytest shows for a failed test."""
        self.process.kill()
        for process in self.alive().values():
            process.kill()
        self.process.wait()
        self.http.close()
        assert self.process.stdout is not None
        self.process.stdout.close()
        print(f"log of the server at {self.url or 'no address'}:\n{self.log}")


class Stream:
    """Client of /generate that reads its events one by one and may disconnect at any time."""

    def __init__(self, url: str, prompt: str | list[int], sampling: dict[str, object]) -> None:
        name = "text" if isinstance(prompt, str) else "input_ids"
        self._client = httpx.Client(timeout=PATIENCE_S)
        request = self._client.build_request(
            "POST",
            f"{url}/generate",
            json={name: prompt, "sampling_params": sampling, "stream": True},
        )
        self._answer = self._client.send(request, stream=True)
        assert self._answer.status_code == 200, self._answer.read()
        self._lines = self._answer.iter_lines()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def event(self) -> dict[str, Any] | None:
        """Return the next event; None after the last."""
        for line in self._lines:
            if line == "data: [DONE]":
                return None
            if line.startswith("data: "):
                parsed: dict[str, Any] = json.loads(line.removeprefix("data: "))
                return parsed
        raise AssertionError("the stream ended without its last event")

    def last(self) -> dict[str, Any]:
        """Read to the end; return the last event, which repeats all output."""
        event: dict[str, Any] = {}
        while (following := self.event()) is not None:
            event = following
        return event

    def leave(self) -> None:
        self._answer.close()
        self._client.close()


@contextmanager
def server_home() -> Iterator[Path]:
    """Yield a short path: socket paths are limited."""
    path = Path(tempfile.mkdtemp(prefix="tl"))
    try:
        yield path
    finally:
        shutil.rmtree(path)


@contextmanager
def started_server(*flags: str, home: Path | None = None) -> Iterator[Server]:
    """Start a server without waiting for it; at the end check that nothing is left."""
    if home is None:
        with server_home() as own, started_server(*flags, home=own) as server:
            yield server
        return
    server = Server(home, *flags)
    try:
        yield server
    finally:
        server.clear()


@contextmanager
def running_server(*flags: str, home: Path | None = None) -> Iterator[Server]:
    """Yield a server that serves; stop it at the end unless the block did."""
    with started_server(*flags, home=home) as server:
        yield server.wait_until_serving()
        if server.process.poll() is None:
            assert server.stop() == 0
        server.assert_nothing_lives()
        assert not server.run_dirs()
        assert not Path(server.door.removeprefix("ipc://")).exists()
        assert "Traceback" not in server.log


def _run_dirs(home: Path) -> list[Path]:
    return list(home.glob("tokenloom-run-*"))


def _flags(flags: tuple[str, ...]) -> list[str]:
    defaults = {"--port": "0", "--start-timeout": str(PATIENCE_S)}
    given = [
        word for name, value in defaults.items() if name not in flags for word in (name, value)
    ]
    return [*given, *flags]


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _name(command: list[str]) -> str:
    """Return a child's name from its process title, or from its arguments before it sets one."""
    title = command[0].partition("::")[2]
    if title:
        return title
    module = command[command.index("-m") + 1] if "-m" in command else ""
    if module == "tokenloom":
        return "launcher"
    return module.removeprefix("tokenloom.").removesuffix("_proc") or " ".join(command)
