"""Engines as processes: ready, dead, late, and nothing of them left in any case."""

import asyncio
import sys
import threading
from pathlib import Path

import psutil
import pytest
from support import fake_openai

from tokenloom.bench import engines
from tokenloom.bench.engines import Engine, EngineFailed, llama_server, running, vllm
from tokenloom.bench.http_stream import HttpClient
from tokenloom.bench.machine import CpuMeter, cores, describe

FAKE = (sys.executable, fake_openai.__file__, "--port", "{port}")


def test_an_engine_runs_until_it_is_left(tmp_path: Path) -> None:
    async def ask(base_url: str) -> int:
        client = HttpClient(base_url)
        try:
            return (await client.get("/v1/models")).status
        finally:
            client.close()

    with running(Engine("fake one", FAKE), tmp_path) as server:
        assert asyncio.run(ask(server.base_url)) == 200
        assert 0 < server.start_seconds < 60
        assert psutil.pid_exists(server.pid)
        server.check()
    assert not psutil.pid_exists(server.pid)
    assert (tmp_path / "fake-one.log").exists()
    with pytest.raises(EngineFailed, match="ended with status"):
        server.check()


def test_an_engine_is_stopped_when_measuring_fails(tmp_path: Path) -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        running(Engine("fake", FAKE), tmp_path) as server,
    ):
        raise KeyboardInterrupt
    assert not psutil.pid_exists(server.pid)


def test_children_in_other_groups_and_stubborn_ones_end_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "STOP_SECONDS", 0.2)
    code = (
        "import runpy, signal, subprocess, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "subprocess.Popen([sys.executable, '-c', 'input()'], stdin=subprocess.PIPE,"
        " start_new_session=True)\n"
        "runpy.run_path(sys.argv.pop(1), run_name='__main__')\n"
    )
    command = (sys.executable, "-c", code, *FAKE[1:])
    with running(Engine("stubborn", command), tmp_path) as server:
        (child,) = psutil.Process(server.pid).children()
    assert not psutil.pid_exists(server.pid)
    psutil.wait_procs([child], timeout=10)
    assert not child.is_running() or child.status() == psutil.STATUS_ZOMBIE


def test_an_engine_that_dies_tells_with_the_end_of_its_log(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "print('no such model'); raise SystemExit(3)")
    with pytest.raises(EngineFailed, match=r"status 3 before it was ready\n    no such model"):
        running(Engine("dead", command), tmp_path).__enter__()


def test_an_engine_that_is_never_ready_is_given_up(tmp_path: Path) -> None:
    engine = Engine("late", FAKE, ready_path="/never", ready_seconds=0.3)
    with pytest.raises(EngineFailed, match="not ready after"):
        running(engine, tmp_path).__enter__()


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(EngineFailed, match="cannot start"):
        running(Engine("none", (str(tmp_path / "none"),)), tmp_path).__enter__()


def test_peers_get_the_cores_and_their_models() -> None:
    llama = llama_server("/bin/llama-server", "q", "m.gguf", threads=2)
    assert llama.command[1:5] == ("-m", "m.gguf", "-t", "2")
    assert "{port}" in llama.command
    two = vllm("/bin/vllm", "dir", threads=2, preload="a.so:b.so")
    assert two.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0-1"
    assert two.environment["LD_PRELOAD"] == "a.so:b.so"
    assert "LD_PRELOAD" not in vllm("/bin/vllm", "dir", threads=1, preload=None).environment


def test_the_meter_sees_who_computes() -> None:
    meter = CpuMeter(psutil.Process().pid)
    over = threading.Event()
    threading.Timer(0.3, over.set).start()
    while not over.is_set():
        sum(range(1000))
    shares = meter.read()
    # This process is both harness and engine here, so that both see the same work.
    assert shares.harness > 0.0
    assert shares.engine == pytest.approx(shares.harness, abs=0.1)
    assert 0.0 <= shares.foreign <= 1.0


def test_the_machine_is_described() -> None:
    assert cores() >= 1
    assert describe()["cores"] == cores()
