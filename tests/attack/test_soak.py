"""Some thousand requests, among them aborted and wrong ones: nothing grows with their number."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from attack.witness import children, unharmed
from support.server import Server

pytestmark = pytest.mark.attack

REQUESTS = 2400
WORKERS = 8
# Of what a process may grow by from the second to the last third; less is noise.
SLOPE_BYTES = {"tokenizer": 12 << 20, "detokenizer": 6 << 20, "scheduler": 24 << 20}


class Clients:
    """Clients, each with a connection of its own, that ask in turn."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._own = threading.local()
        self._all: list[httpx.Client] = []

    def ask(self, number: int) -> None:
        chance = random.Random(number)
        kinds: list[Callable[[int], None]] = [self._short, self._short, self._aborted, self._wrong]
        chance.choice(kinds)(number)

    def run(self, numbers: range) -> None:
        with ThreadPoolExecutor(WORKERS) as pool:
            for _ in pool.map(self.ask, numbers):
                pass
        for client in self._all:
            client.close()
        self._all.clear()

    @property
    def _client(self) -> httpx.Client:
        if not hasattr(self._own, "client"):
            self._own.client = httpx.Client(base_url=self._server.url, timeout=120)
            self._all.append(self._own.client)
        client: httpx.Client = self._own.client
        return client

    def _short(self, number: int) -> None:
        sampling = {"max_new_tokens": 2, "temperature": 0.0}
        body = {"text": f"Number {number} is", "sampling_params": sampling}
        assert self._client.post("/generate", json=body).status_code == 200

    def _aborted(self, number: int) -> None:
        sampling = {"max_new_tokens": 500, "ignore_eos": True}
        body = {"text": f"Number {number} is", "stream": True, "sampling_params": sampling}
        with self._client.stream("POST", "/generate", json=body) as answer:
            assert answer.status_code == 200
            next(answer.iter_lines())

    def _wrong(self, number: int) -> None:
        sampling = {"max_new_tokens": -1 - number, "stop": ["a" * 300]}
        body = {"text": "x", "sampling_params": sampling}
        assert self._client.post("/generate", json=body).status_code == 400


def resident(server: Server) -> dict[str, int]:
    return {name: process.memory_info().rss for name, process in children(server).items()}


def test_memory_does_not_follow_the_number_of_requests(server: Server) -> None:
    with unharmed(server):
        sizes = []
        for third in range(3):
            Clients(server).run(range(third * REQUESTS // 3, (third + 1) * REQUESTS // 3))
            sizes.append(resident(server))
        grown = {name: sizes[2][name] - sizes[1][name] for name in sizes[0]}
        assert all(grown[name] <= SLOPE_BYTES[name] for name in grown), (sizes, grown)
