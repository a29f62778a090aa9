"""Processes that are killed or stopped under load: each stream gets one last word, nothing is left.

tests/e2e/test_endings.py does this to two streams, here it is done to a crowd at any moment.
"""

import json
import random
import threading
from collections.abc import Iterator

import httpx
import psutil
import pytest
from attack.conftest import FLAGS
from attack.witness import connect, is_healthy, unharmed
from support.server import (
    CHILDREN,
    GONE_S,
    PATIENCE_S,
    Server,
    running_server,
    started_server,
    wait_for,
)

pytestmark = pytest.mark.attack

STREAMS = 12


class Crowd:
    """Streams that are read by threads; what each of them got last."""

    def __init__(self, server: Server, max_new_tokens: int) -> None:
        self.events = 0
        self.ends: list[str] = []
        self._server = server
        self._sampling = {"max_new_tokens": max_new_tokens, "ignore_eos": True}
        names = range(STREAMS)
        self._threads = [threading.Thread(target=self._read, args=(name,)) for name in names]
        for thread in self._threads:
            thread.start()

    def _read(self, name: int) -> None:
        body = {"text": f"Story {name}", "stream": True, "sampling_params": self._sampling}
        errors = last = 0
        answered = False
        try:
            with httpx.Client(timeout=PATIENCE_S) as client:
                url = f"{self._server.url}/generate"
                with client.stream("POST", url, json=body) as answer:
                    answered = True
                    if answer.status_code != 200:
                        self.ends.append(str(answer.status_code))
                        return
                    for line in answer.iter_lines():
                        assert not (last and line), "nothing follows the last word"
                        self.events += line.startswith("data: {")
                        errors += line.startswith('data: {"error"')
                        last += line == "data: [DONE]"
            self.ends.append("error" if errors else "done" if last else "cut")
        except httpx.TransportError:
            self.ends.append("cut" if answered else "too late")
        assert errors <= 1

    def join(self) -> list[str]:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
        return self.ends


@pytest.mark.parametrize("events", [1, 200], ids=["at the beginning", "in the middle"])
@pytest.mark.parametrize("name", sorted(CHILDREN))
def test_a_killed_child_under_load(name: str, events: int) -> None:
    with started_server(*FLAGS) as server:
        crowd = Crowd(server.wait_until_serving(), 1500)
        wait_for(lambda: crowd.events >= events)
        server.child(name).kill()
        assert server.end() == 1
        server.assert_nothing_lives()
        assert not server.run_dirs()
        ends = crowd.join()
        assert len(ends) == STREAMS
        if name == "tokenizer":  # who would have to speak is gone
            assert set(ends) <= {"cut", "too late"}
        else:
            assert set(ends) <= {"error", "503", "too late"}
            assert "error" in ends
        assert "Traceback" not in server.log


def test_a_killed_launcher_under_load() -> None:
    with started_server(*FLAGS) as server:
        crowd = Crowd(server.wait_until_serving(), 1500)
        wait_for(lambda: crowd.events >= 100)
        server.process.kill()
        wait_for(lambda: not server.alive(), GONE_S)
        assert len(crowd.join()) == STREAMS


def test_children_killed_while_they_start() -> None:
    """At moments of chance: nothing hangs, nothing stays."""
    chance = random.Random(5)
    for name in sorted(CHILDREN):
        with started_server(*FLAGS) as server:
            child = server.child(name)
            with pytest.raises(psutil.TimeoutExpired):
                child.wait(chance.random())
            child.kill()
            assert server.end() == 1
            server.assert_nothing_lives()
            assert not server.run_dirs()


@pytest.fixture(scope="module")
def lasting() -> Iterator[Server]:
    with running_server(*FLAGS) as server:
        yield server


@pytest.mark.parametrize("name", sorted(CHILDREN))
def test_a_stopped_child_under_load(lasting: Server, name: str) -> None:
    """Not healthy while it is stopped; every stream goes on to its end afterwards."""
    crowd = Crowd(lasting, 200)
    wait_for(lambda: crowd.events >= 20)
    child = lasting.child(name)
    child.suspend()
    try:
        if name == "tokenizer":  # nobody is there to answer, connections wait in the system
            with connect(lasting) as plain:
                plain.sendall(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
                plain.settimeout(1)
                with pytest.raises(TimeoutError):
                    plain.recv(1)
        else:
            wait_for(lambda: not is_healthy(lasting), 60)
            stuck = json.loads(httpx.get(f"{lasting.url}/health").content)
            assert name in stuck["reason"]
            probes = [httpx.get(f"{lasting.url}/livez").status_code for _ in range(20)]
            assert set(probes) == {200}
    finally:
        child.resume()
    assert crowd.join() == ["done"] * STREAMS
    wait_for(lambda: is_healthy(lasting), 60)
    with unharmed(lasting) as witness:
        witness.gets_on()
