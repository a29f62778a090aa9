"""The launcher over fake children: every way in which a set of processes starts and ends."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CHILDREN = {"tokenizer", "scheduler", "detokenizer"}
NOTICED_S = 2.0  # one second by contract, one for a busy test machine
Start = Callable[..., Any]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_says_one_line_when_serving_and_drains_on_a_signal(
    start_set: Start, signum: signal.Signals
) -> None:
    server = start_set()
    assert server.serving_line() == (
        "tokenloom is serving fake-model at http://fake:1 - "
        "The server is fired up and ready to roll!\n"
    )
    assert set(server.alive()) == CHILDREN
    (run_dir,) = server.run_dirs()
    assert run_dir.stat().st_mode & 0o777 == 0o700
    server.process.send_signal(signum)
    status, logged = server.end()
    assert status == 0
    assert "drained" in logged
    assert not server.alive()
    assert not server.run_dirs()


@pytest.mark.parametrize("redirect", [">&-", ">/dev/full", "<&- >&-"])
def test_standard_output_that_takes_nothing_does_not_matter(
    start_set: Start, redirect: str
) -> None:
    server = start_set(redirect=redirect)
    logged = ""
    while "launcher] ready after" not in logged:
        line = server.process.stderr.readline()
        assert line, f"the launcher has ended: {logged}"
        logged += line
    server.process.terminate()
    status, after = server.end()
    assert status == 0
    assert "Traceback" not in logged + after
    full = "standard output takes no line (No space left on device): tokenloom is serving fake"
    assert (full in logged) == (redirect == ">/dev/full")


def test_name_that_the_terminal_cannot_spell_is_written_in_ascii(
    start_set: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    server = start_set(model_name="Grüße")
    assert server.serving_line().startswith("tokenloom is serving Gr\\xfc\\xdfe at http://fake:1")
    server.process.terminate()
    assert server.end()[0] == 0


def test_ctrl_c_in_the_terminal_drains_too(start_set: Start) -> None:
    server = start_set()
    server.serving_line()
    for process in [*server.alive().values(), server.process]:
        process.send_signal(signal.SIGINT)  # a terminal signals the whole group
    assert server.end()[0] == 0


def test_service_manager_that_signals_every_process_gets_a_drain(start_set: Start) -> None:
    server = start_set()
    server.serving_line()
    for process in [server.process, *server.alive().values()]:
        process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0


@pytest.mark.parametrize("name", sorted(CHILDREN))
def test_killed_child_ends_the_set(start_set: Start, name: str) -> None:
    server = start_set()
    server.serving_line()
    server.alive()[name].kill()
    status, logged = server.end(NOTICED_S)
    assert status == 1
    assert f"{name} died while ready: killed by SIGKILL (often: out of memory)" in logged
    heard = f"heard [ChildDied(name='{name}', how='killed by SIGKILL (often: out of memory)')]"
    assert (heard in logged) == (name != "tokenizer"), "the front tells its clients before it ends"
    assert not server.alive()
    assert not server.run_dirs()


def test_front_that_hears_nothing_of_a_death_is_killed_with_the_rest(start_set: Start) -> None:
    server = start_set(tokenizer="deaf")
    server.serving_line()
    server.alive()["scheduler"].kill()
    status, logged = server.end()
    assert status == 1
    assert "scheduler died while ready" in logged
    assert not server.alive()


def test_last_words_of_a_crash_are_printed(start_set: Start) -> None:
    server = start_set(scheduler="crash when ready")
    status, logged = server.end()
    assert status == 1
    assert "scheduler died while ready: exit status 1; its last words: RuntimeError: broken" in (
        logged
    )
    assert "in after_ready" in logged


def test_child_that_leaves_with_0_unasked_is_a_failure(start_set: Start) -> None:
    status, logged = start_set(detokenizer="leave when ready").end()
    assert status == 1
    assert "detokenizer died while ready: exit status 0" in logged


@pytest.mark.parametrize(
    ("behaviour", "words"),
    [
        ("crash at start", "exit status 1; its last words: RuntimeError: broken on purpose"),
        ("exit at start", "exit status 7"),
        ("refuse", "exit status 1; its last words: this model is no model\n"),
    ],
)
def test_death_at_start_ends_the_set(start_set: Start, behaviour: str, words: str) -> None:
    server = start_set(scheduler=behaviour)
    status, logged = server.end()
    assert status == 1
    assert f"scheduler died while starting: {words}" in logged
    assert ("Traceback" in logged) == (behaviour == "crash at start")
    assert not server.alive()
    assert not server.run_dirs()


def test_start_has_a_deadline(start_set: Start) -> None:
    server = start_set(start_timeout=1.5, scheduler="never ready")
    status, logged = server.end()
    assert status == 1
    assert "not ready within 1.5 s: " in logged
    assert "scheduler" in logged
    assert not server.alive()
    assert not server.run_dirs()


@pytest.mark.parametrize("name", sorted(CHILDREN))
@pytest.mark.parametrize(
    "moment", ["stop launcher at once", "stop launcher at start", "stop launcher when ready"]
)
def test_sigterm_during_the_start_leaves_nothing(start_set: Start, name: str, moment: str) -> None:
    # A second child that never gets ready keeps the set in its start.
    other = "scheduler" if name != "scheduler" else "detokenizer"
    server = start_set(**{name: moment, other: "never ready"})
    status, logged = server.end()
    assert status == 128 + signal.SIGTERM
    assert "stopped by SIGTERM before it was ready" in logged
    assert not server.alive()
    assert not server.run_dirs()


@pytest.mark.parametrize("living", [0, 1, 2, 3])
def test_sigint_while_children_appear_leaves_nothing(start_set: Start, living: int) -> None:
    server = start_set(tokenizer="never ready")
    server.wait_for(lambda: server.run_dirs() and len(server.alive()) >= living)
    server.process.send_signal(signal.SIGINT)
    assert server.end()[0] == 128 + signal.SIGINT
    assert not server.alive()
    assert not server.run_dirs()


def test_second_signal_cuts_the_drain_short(start_set: Start) -> None:
    server = start_set(scheduler="stuck in drain")
    server.serving_line()
    server.process.send_signal(signal.SIGTERM)
    assert any("draining" in line for line in server.process.stderr)
    server.process.send_signal(signal.SIGINT)
    assert server.end(NOTICED_S)[0] == 128 + signal.SIGINT
    assert not server.alive()
    assert not server.run_dirs()


def test_drain_has_a_deadline(start_set: Start) -> None:
    server = start_set(drain_timeout=0.2, scheduler="stuck in drain")
    server.serving_line()
    server.process.send_signal(signal.SIGTERM)
    status, logged = server.end()
    assert status == 1
    assert "drain time is over, killing: " in logged
    assert not server.alive()


def test_crash_in_the_drain_is_a_failure(start_set: Start) -> None:
    server = start_set(scheduler="crash in drain")
    server.serving_line()
    server.process.send_signal(signal.SIGTERM)
    status, logged = server.end()
    assert status == 1
    assert "scheduler died while draining: exit status 1" in logged
    assert "heard [ChildDied(name='scheduler'" in logged


@pytest.mark.parametrize("scheduler", ["well", "never ready", "hold the interpreter"])
def test_killed_launcher_takes_its_children_along(start_set: Start, scheduler: str) -> None:
    server = start_set(scheduler=scheduler)
    if scheduler == "well":
        server.serving_line()
    else:
        server.wait_for(lambda: set(server.alive()) == CHILDREN)
    server.process.kill()
    server.wait_for(lambda: not server.alive(), seconds=5.0)


def test_run_dir_of_a_killed_launcher_is_reclaimed_and_a_living_one_kept(
    start_set: Start,
) -> None:
    living, killed = start_set(), start_set()
    living.serving_line()
    killed.serving_line()
    assert len(living.run_dirs()) == 2
    killed.process.kill()
    killed.end()
    fresh = start_set()
    fresh.serving_line()
    assert len(fresh.run_dirs()) == 2
    for server in (living, fresh):
        assert set(server.alive()) == CHILDREN
        server.process.send_signal(signal.SIGTERM)
        assert server.end()[0] == 0
    assert not fresh.run_dirs()


def test_temporary_directory_with_too_long_a_name_is_refused(
    short_tmp: Path, start_set: Start
) -> None:
    deep = short_tmp / ("x" * 80)
    deep.mkdir()
    server = start_set(tmpdir=deep)
    status, logged = server.end()
    assert status == 1
    assert "107" in logged
    assert "TMPDIR" in logged
    assert "Traceback" not in logged
    assert not list(deep.iterdir())
