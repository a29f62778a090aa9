"""Engines to compare: how to start and query each, and running one as a process.

`peers` makes the values from what is installed. A started engine is always stopped, with all its
processes; its output goes to a log file.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from .http_stream import HttpClient

STOP_SECONDS = 15.0
POLL_SECONDS = 0.25
LOG_TAIL_LINES = 15


class EngineFailed(Exception):
    """An engine did not start, or died; the message has the end of its log."""


@dataclass(frozen=True)
class Engine:
    """A server to measure; `command` contains {port}, `model` None means the first it lists.

    `takes_ids` is False if prompts must be text; `fields` replace the usual request fields.
    """

    name: str
    command: tuple[str, ...]
    ours: bool = False
    ready_path: str = "/health"
    ready_seconds: float = 120.0
    environment: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None
    takes_ids: bool = True
    fields: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Running:
    base_url: str
    pid: int
    start_seconds: float  # until ready
    process: "subprocess.Popen[bytes]"
    log: Path

    def check(self) -> None:
        """Raise EngineFailed if the engine has ended."""
        code = self.process.poll()
        if code is not None:
            raise EngineFailed(f"ended with status {code}\n{_tail(self.log)}")


@contextlib.contextmanager
def running(engine: Engine, logs: Path) -> Iterator[Running]:
    """Start an engine, wait until it is ready, stop it at the end. Raises EngineFailed."""
    port = _free_port()
    log = logs / f"{engine.name.replace('/', '-').replace(' ', '-')}.log"
    command = [part.replace("{port}", str(port)) for part in engine.command]
    started = time.monotonic()
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **engine.environment},
                start_new_session=True,  # a process group that can be ended as one
            )
        except OSError as error:
            raise EngineFailed(f"cannot start {command[0]}: {error}") from error
        try:
            base_url = f"http://127.0.0.1:{port}"
            _await_ready(engine, base_url, process, log)
            seconds = time.monotonic() - started
            yield Running(base_url, process.pid, seconds, process, log)
        finally:
            _stop(process)


def _await_ready(
    engine: Engine, base_url: str, process: "subprocess.Popen[bytes]", log: Path
) -> None:
    deadline = time.monotonic() + engine.ready_seconds
    while time.monotonic() < deadline:
        code = process.poll()
        if code is not None:
            raise EngineFailed(f"ended with status {code} before it was ready\n{_tail(log)}")
        if asyncio.run(_answers(base_url, engine.ready_path)):
            return
        time.sleep(POLL_SECONDS)
    raise EngineFailed(f"not ready after {engine.ready_seconds:.0f} s\n{_tail(log)}")


async def _answers(base_url: str, path: str) -> bool:
    client = HttpClient(base_url)
    try:
        async with asyncio.timeout(5):
            return (await client.get(path)).status == 200
    except (OSError, ValueError):  # a TimeoutError is an OSError
        return False
    finally:
        client.close()


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Terminate the process, then kill what is left of its group and descendants."""
    descendants: list[psutil.Process] = []
    try:
        if process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                descendants = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
    finally:  # a second Ctrl-C shortens the wait and nothing else
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for one in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(f"    {line}" for line in lines[-LOG_TAIL_LINES:])


def tokenloom(python: str, name: str, flags: tuple[str, ...]) -> Engine:
    command = (python, "-m", "tokenloom", "serve", "--port", "{port}", *flags)
    return Engine(name, command, ours=True)


def llama_server(path: str, name: str, gguf: str, threads: int) -> Engine:
    """llama.cpp's server with 32 slots of 1,536 tokens, enough for the largest workload."""
    options = f"-t {threads} -tb {threads} -np 32 -c 49152 --no-webui --host 127.0.0.1"
    return Engine(name, (path, "-m", gguf, *options.split(), "--port", "{port}"))


def vllm(path: str, directory: str, threads: int, preload: str | None) -> Engine:
    """vLLM with all cores for its worker; by default it leaves one to its API server."""
    options = "--max-model-len 2048 --max-num-seqs 64 --enable-prompt-tokens-details"
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "0",
    }
    if preload:
        environment["LD_PRELOAD"] = preload
    return Engine(
        "vLLM bf16",
        (path, "serve", directory, *options.split(), "--host", "127.0.0.1", "--port", "{port}"),
        ready_seconds=400.0,
        environment=environment,
    )


def transformers(path: str, directory: str) -> Engine:
    """transformers' server with continuous batching, which takes text and fewer fields."""
    options = "--continuous-batching --device cpu --dtype bfloat16 --host 127.0.0.1"
    endless = {"do_sample": False, "eos_token_id": [-1], "pad_token_id": 0}
    return Engine(
        "transformers bf16",
        (path, "serve", directory, *options.split(), "--port", "{port}"),
        ready_seconds=200.0,
        model=directory,
        takes_ids=False,
        fields={"generation_config": json.dumps(endless)},
    )
