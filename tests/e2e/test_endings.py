"""How a server ends: killed at any point, stopped while streams run, restarted on its port."""

import os
import re
import signal
import threading
from pathlib import Path

import httpx
import pytest
from e2e.mode import DTYPE
from support.server import (
    CHILDREN,
    GONE_S,
    PATIENCE_S,
    Server,
    running_server,
    started_server,
    wait_for,
)

from tokenloom.client import Client, RequestRefused, ServerGone

pytestmark = pytest.mark.slow

FLAGS = ("--dtype", DTYPE, "--kv-tokens", "8192")
LONG = {"max_new_tokens": 2000, "ignore_eos": True}
PROMPT = "Once upon a time"


class Streams:
    """Two running streams, one per door; threads record how they end."""

    def __init__(self, server: Server, max_new_tokens: int) -> None:
        self.texts: list[str] = []
        self.told: list[str] = []  # error messages from the server, at most one per stream
        self.errors: list[Exception] = []
        options = {"max_new_tokens": max_new_tokens, "ignore_eos": True}
        self._http = server.stream(PROMPT, **options)
        self._http.event()
        self._client = Client(server.door)
        self._answer = self._client.generate(PROMPT, temperature=0.0, **options)
        self._deltas = iter(self._answer)
        next(self._deltas)
        self._threads = [threading.Thread(target=read) for read in (self._by_http, self._by_socket)]
        for thread in self._threads:
            thread.start()

    def _by_http(self) -> None:
        try:
            last = self._http.last()
            if "error" in last:
                self.told.append(last["error"]["message"])
            else:
                self.texts.append(last["text"])
        except (httpx.TransportError, AssertionError) as error:
            self.errors.append(error)

    def _by_socket(self) -> None:
        try:
            for _ in self._deltas:
                pass
            self.texts.append(self._answer.text)
        except RequestRefused as refused:
            self.told.append(str(refused))
        except ServerGone as error:
            self.errors.append(error)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        self._http.leave()
        self._client.close()


@pytest.mark.parametrize("name", sorted(CHILDREN))
def test_killed_child_ends_all(name: str) -> None:
    with started_server(*FLAGS) as server:
        streams = Streams(server.wait_until_serving(), 2000)
        server.child(name).kill()
        assert server.end(GONE_S) == 1
        server.assert_nothing_lives()
        assert not server.run_dirs()
        assert f"{name} died while ready: killed by SIGKILL" in server.log
        streams.join()
        if name == "tokenizer":
            assert len(streams.errors) == 2, "clients hear of the end at once"
        else:
            reason = f"its {name} process died (killed by SIGKILL (often: out of memory))"
            assert [reason in words for words in streams.told] == [True, True], streams.told


def test_a_start_is_told_in_a_few_lines_for_people(server: Server) -> None:
    lines = server.log.splitlines()
    first = lines[: next(n for n, line in enumerate(lines, 1) if "listening: HTTP at" in line)]
    assert len(first) < 8, "with the one on standard output"
    assert not [line for line in first if "{" in line], "no JSON"
    (loaded,) = [line for line in first if "loaded in" in line]
    size = re.search(r"loaded in [\d.]+ s: (\d+) MB of weights in (\w+)$", loaded)
    assert size is not None, loaded
    assert int(size[1]) > 50
    assert size[2] == DTYPE
    assert any(f"KV pool: {server.info()['max_total_num_tokens']} tokens" in line for line in first)
    assert server.door in first[-1]
    assert "adapters: off" in first[-1]


@pytest.mark.parametrize("name", ["scheduler", "detokenizer"])
def test_stopped_child_is_not_ready_until_it_goes_on(server: Server, name: str) -> None:
    child = server.child(name)
    child.suspend()
    try:
        stuck = wait_for(lambda: not_ready(server))
        assert stuck["status"] == "stuck"
        assert f"the {name} process" in stuck["reason"]
        assert server.http.get(f"{server.url}/livez").status_code == 200
    finally:
        child.resume()
    wait_for(lambda: not_ready(server) is None)
    assert server.http.get(f"{server.url}/health_generate").status_code == 200


def not_ready(server: Server) -> dict[str, str] | None:
    answer = server.http.get(f"{server.url}/health")
    return None if answer.status_code == 200 else answer.json()


def test_killed_launcher_leaves_nothing_and_its_remains_are_reclaimed(home: Path) -> None:
    with started_server(*FLAGS, home=home) as server:
        streams = Streams(server.wait_until_serving(), 2000)
        port = str(server.port)
        server.process.kill()
        server.assert_nothing_lives()
        streams.join()
        assert len(streams.errors) == 2
        (left,) = server.run_dirs()
    with running_server(*FLAGS, "--port", port, home=home) as successor:
        assert not left.exists()
        assert successor.generate(PROMPT, max_new_tokens=2)["output_ids"]
        with Client(successor.door) as client:
            assert client.complete(PROMPT, max_new_tokens=2).token_ids
    assert not list(home.glob("tokenloom-*/*")), "the door's socket is gone too"


@pytest.mark.parametrize("when", ["imports", "loads"])
def test_launcher_killed_during_start_leaves_nothing(when: str) -> None:
    """The scheduler is caught before it watches its launcher, or while it reads weights."""
    with started_server(*FLAGS) as server:
        server.child("scheduler")
        if when == "loads":
            wait_for(lambda: "loading" in server.log)
        server.process.kill()
        server.assert_nothing_lives()


def test_launcher_killed_before_its_children_can_see_it_leaves_nothing() -> None:
    """The scheduler is stopped as soon as it exists and resumed after its launcher has died."""
    with started_server(*FLAGS) as server:
        scheduler = server.child("scheduler")
        scheduler.suspend()
        server.process.kill()
        server.process.wait(PATIENCE_S)
        if scheduler.is_running():  # else the kernel has killed it already
            scheduler.resume()
        server.assert_nothing_lives()


@pytest.mark.parametrize("how", ["SIGTERM", "Ctrl-C", "SIGTERM to all"])
def test_drain_lets_streams_end(how: str) -> None:
    with running_server(*FLAGS) as server:
        whole = server.generate(PROMPT, max_new_tokens=24, ignore_eos=True)["text"]
        streams = Streams(server, 24)
        if how == "SIGTERM":
            server.process.terminate()
        elif how == "Ctrl-C":
            os.killpg(server.process.pid, signal.SIGINT)
        else:
            for process in server.alive().values():
                process.terminate()
        streams.join()
        assert streams.texts == [whole, whole]
        assert server.end() == 0
        assert "drained" in server.log


def test_draining_server_says_so_and_takes_no_more() -> None:
    with running_server(*FLAGS) as server, server.stream(PROMPT, **LONG) as stream:
        stream.event()
        server.process.terminate()
        wait_for(lambda: "draining: 1 requests" in server.log)
        health = server.http.get(f"{server.url}/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        refused = server.http.post(f"{server.url}/generate", json={"text": PROMPT})
        assert refused.status_code == 503
        assert int(refused.headers["retry-after"]) > 0
        stream.leave()
        assert server.end() == 0


def test_drain_ends_streams_that_take_too_long() -> None:
    """Each stream gets exactly one terminal message, over either door."""
    with (
        running_server(*FLAGS, "--drain-timeout", "0.1") as server,
        server.stream(PROMPT, **LONG) as by_http,
        Client(server.door) as client,
    ):
        by_http.event()
        by_socket = iter(client.generate(PROMPT, **LONG))
        next(by_socket)
        server.process.terminate()
        with pytest.raises(RequestRefused, match="--drain-timeout"):
            for _ in by_socket:
                pass
        error = by_http.last()["error"]
        assert error["code"] == "unavailable"
        assert "--drain-timeout" in error["message"]
        assert server.end() == 0


def test_second_signal_ends_at_once() -> None:
    with (
        started_server(*FLAGS) as server,
        server.wait_until_serving().stream(PROMPT, **LONG) as one,
    ):
        one.event()
        server.process.terminate()
        wait_for(lambda: "draining" in server.log)
        server.process.send_signal(signal.SIGINT)
        assert server.end(GONE_S) == 128 + signal.SIGINT
        server.assert_nothing_lives()
        assert not server.run_dirs()


def test_starts_again_on_the_same_port_at_once(home: Path) -> None:
    """Also while a client of the first server keeps its connection open."""
    with running_server(*FLAGS, home=home) as first:
        port = str(first.port)
        with httpx.Client(timeout=PATIENCE_S) as held:
            assert held.get(f"{first.url}/health").status_code == 200
            assert first.stop() == 0
            with running_server(*FLAGS, "--port", port, home=home) as second:
                assert held.get(f"{second.url}/health").status_code == 200


def test_two_servers_side_by_side(home: Path, server: Server) -> None:
    """Two servers share a TMPDIR; a third fails to bind a taken port without harm to its owner."""
    with (
        running_server(*FLAGS, home=home) as one,
        running_server(*FLAGS, "--served-model-name", "other", home=home) as two,
    ):
        assert one.port != two.port
        with Client(one.door) as first, Client(two.door) as second:
            assert first.ping().model == "SmolLM2-135M-Instruct"
            assert second.ping().model == "other"
            options = {"max_new_tokens": 8, "temperature": 0.0}
            assert first.complete(PROMPT, **options) == second.complete(PROMPT, **options)
        with started_server(*FLAGS, "--port", str(one.port), home=home) as third:
            assert third.end() == 1
            assert f"cannot listen on 127.0.0.1:{one.port}: Address already in use" in third.log
        assert two.stop() == 0
        assert one.generate(PROMPT, max_new_tokens=2)["output_ids"]


def test_loading_server_answers_health(home: Path) -> None:
    """The scheduler is stopped while it loads, so that the front answers without it."""
    with httpx.Client() as client, started_server(*FLAGS, home=home) as server:
        scheduler = server.child("scheduler")
        scheduler.suspend()
        door = wait_for(lambda: list(home.glob("tokenloom-*/port-*.sock")))[0]
        url = f"http://127.0.0.1:{door.stem.removeprefix('port-')}"
        health = client.get(f"{url}/health", timeout=PATIENCE_S)
        assert (health.status_code, health.json()["status"]) == (503, "loading")
        refused = client.post(f"{url}/generate", json={"text": PROMPT})
        assert refused.status_code == 503
        assert "loading" in refused.json()["error"]["message"]
        assert client.get(f"{url}/health_generate").status_code == 503
        assert client.get(f"{url}/get_server_info").json()["status"] == "loading"
        assert client.get(f"{url}/v1/models").status_code == 200
        scheduler.resume()
        assert server.wait_until_serving().url == url
        assert client.get(f"{url}/health").status_code == 200
        assert client.get(f"{url}/health_generate", timeout=PATIENCE_S).status_code == 200
        assert server.stop() == 0


def test_stop_while_loading() -> None:
    with started_server(*FLAGS) as server:
        wait_for(lambda: "loading" in server.log)
        server.process.terminate()
        assert server.end(GONE_S) == 128 + signal.SIGTERM
        server.assert_nothing_lives()
        assert not server.run_dirs()
