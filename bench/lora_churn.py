"""Adapters under churn at a running server: `python -m tokenloom.bench.lora_churn --root DIR`.

Clients request many more adapters than slots (Zipf), reload names in use with other weights, and
leave midway. Every answer must match a version that its name had when it began, requested again
alone and without a cache. Start the server with `--lora-root DIR` in a mode whose answers do not
depend on batch-mates (int8, int4).
"""

import argparse
import asyncio
import json
import random
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..client import AsyncClient
from ..client.errors import RequestRefused
from .random_adapters import write_adapter

RANK, MODULES, SCALE = 2, ("self_attn.q_proj", "mlp.down_proj"), 0.5  # small files
VERSIONS = 2  # between which a name alternates
PROMPT = [(place * place * 29) % 40_000 + 3 for place in range(24)]
ANSWER, PROBE_ANSWER = 24, 400
RELOADS, LEAVES = 0.3, 0.1  # shares of client actions
ALONE = "alone"

Version = tuple[int, int]  # adapter number, version of its weights


@dataclass(slots=True, eq=False)
class Heard:
    """An answer or its beginning, and the versions its name had between sending and first token."""

    ids: list[int]
    versions: set[Version]


@dataclass(slots=True, eq=False)
class Name:
    number: int
    version: int = 0
    reloading: bool = False
    # of requests without a token, by identity: equal sets may be of different requests
    starting: dict[int, set[Version]] = field(default_factory=dict)


class Churn:
    def __init__(self, client: AsyncClient, root: Path, count: int, seed: int) -> None:
        self.names = [Name(number) for number in range(count)]
        self.heard: list[Heard] = []
        self.done: Counter[str] = Counter()
        self.gaps: dict[str, list[float]] = {"during loads": [], "without": []}
        self._client = client
        self._root = root
        self._random = random.Random(seed)
        self._weights = [1 / (number + 1) for number in range(count)]  # Zipf
        self._loads = 0  # in progress

    def path(self, version: Version) -> Path:
        return self._root / f"churn-{version[0]}-{version[1]}"

    def write(self) -> None:
        for name in self.names:
            for version in range(VERSIONS):
                seed = name.number * VERSIONS + version
                write_adapter(
                    self.path((name.number, version)), seed, RANK, modules=MODULES, scale=SCALE
                )

    async def load(self, name: Name, version: int) -> None:
        self._loads += 1
        try:
            path = self.path((name.number, version))
            await self._client.load_lora(f"churn-{name.number}", str(path))
        finally:
            self._loads -= 1
        name.version = version
        for versions in name.starting.values():
            versions.add((name.number, version))

    async def work(self, until: float) -> None:
        """Run one client until `until`."""
        while time.monotonic() < until:
            [name] = self._random.choices(self.names, self._weights)
            try:
                if self._random.random() >= RELOADS:
                    await self._ask(name)
                elif not name.reloading:
                    await self._reload(name)
            except RequestRefused as refused:
                if refused.status not in (409, 503):  # no room now
                    raise
                self.done[f"refused with {refused.status}"] += 1
                await asyncio.sleep(0.01)

    async def _reload(self, name: Name) -> None:
        name.reloading = True
        try:
            await self.load(name, (name.version + 1) % VERSIONS)
        finally:
            name.reloading = False
        self.done["reloads"] += 1

    async def _ask(self, name: Name) -> None:
        leaves = self._random.random() < LEAVES
        versions = {(name.number, name.version)}
        name.starting[id(versions)] = versions
        answer = self._client.generate(
            input_ids=PROMPT,
            lora_path=f"churn-{name.number}",
            max_new_tokens=ANSWER,
            ignore_eos=True,
            temperature=0.0,
        )
        try:
            while await answer.read() is not None:
                name.starting.pop(id(versions), None)
                if leaves and len(answer.token_ids) >= ANSWER // 2:
                    break
        finally:
            answer.abort()
            name.starting.pop(id(versions), None)
        self.done["aborts" if leaves else "answers"] += 1
        self.heard.append(Heard(answer.token_ids, versions))

    async def probe(self, until: float) -> None:
        """Stream from the base model all the time and record the gaps between tokens."""
        while time.monotonic() < until:
            answer = self._client.generate(
                input_ids=PROMPT, max_new_tokens=PROBE_ANSWER, ignore_eos=True, temperature=0.0
            )
            last, loads = None, self._loads
            while await answer.read() is not None and time.monotonic() < until:
                now = time.monotonic()
                if last is not None:
                    kind = "during loads" if loads or self._loads else "without"
                    self.gaps[kind].append(now - last)
                last, loads = now, self._loads
            answer.abort()

    async def check(self) -> list[str]:
        """Return the wrong answers, after requesting each possible version alone."""
        alone: dict[Version, list[int]] = {}
        for version in sorted({version for heard in self.heard for version in heard.versions}):
            await self.load(self.names[version[0]], version[1])
            said = await self._client.complete(
                input_ids=PROMPT,
                lora_path=f"churn-{version[0]}",
                max_new_tokens=ANSWER,
                ignore_eos=True,
                temperature=0.0,
                cache_salt=f"{ALONE} {time.monotonic_ns()}",
            )
            alone[version] = said.token_ids
        self.done["versions asked alone"] = len(alone)
        self.done["different answers of them"] = len({tuple(ids) for ids in alone.values()})
        return [
            f"an answer is of none of {sorted(heard.versions)}: {heard.ids}"
            for heard in unlike(self.heard, alone)
        ]


def unlike(heard: Sequence[Heard], alone: dict[Version, list[int]]) -> list[Heard]:
    """Return the answers that match none of their possible versions."""
    return [
        one
        for one in heard
        if not any(alone[version][: len(one.ids)] == one.ids for version in one.versions)
    ]


def server_info(url: str) -> dict[str, Any]:
    with urllib.request.urlopen(f"{url}/get_server_info", timeout=60) as answer:
        info: dict[str, Any] = json.load(answer)
    return info


async def left_over(url: str, client: AsyncClient, before: list[str]) -> list[str]:
    """Return what the server still holds after all requests ended; polls until it is idle."""
    for _ in range(100):
        info = await asyncio.to_thread(server_info, url)
        stats = info["scheduler"] or {}
        held = {name: stats.get(name, 1) for name in ("running", "waiting", "used_tokens")}
        held["requests in flight"] = info["front"]["requests_in_flight"]
        if not any(held.values()):
            break
        await asyncio.sleep(0.1)
    held["violations"] = stats.get("violations_total", 1)
    left = [f"{number} {name} left" for name, number in held.items() if number]
    return left + [f"adapter {name} left" for name in await client.loras() if name not in before]


async def run(args: argparse.Namespace) -> int:
    async with AsyncClient(args.socket, port=args.port) as client:
        before = await client.loras()
        churn = Churn(client, args.root, args.adapters, args.seed)
        await asyncio.to_thread(churn.write)
        for name in churn.names:
            await churn.load(name, 0)
        until = time.monotonic() + args.seconds
        async with asyncio.TaskGroup() as group:
            group.create_task(churn.probe(until))
            for _ in range(args.clients):
                group.create_task(churn.work(until))
        wrong = await churn.check()
        for name in churn.names:
            await client.unload_lora(f"churn-{name.number}")
        wrong += await left_over(f"http://127.0.0.1:{args.port}", client, before)
    report(churn, wrong)
    return 1 if wrong else 0


def report(churn: Churn, wrong: list[str]) -> None:
    for what, count in sorted(churn.done.items()):
        print(f"{count:8,}  {what}")
    for kind, gaps in churn.gaps.items():
        if gaps:
            middle = sorted(gaps)[len(gaps) // 2]
            print(f"gaps {kind}: {len(gaps):,}, median {middle * 1e3:.0f} ms, "
                  f"largest {max(gaps) * 1e3:.0f} ms")  # fmt: skip
    print("\n".join(wrong[:20]) or "all answers are those of their adapters; nothing is left")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tokenloom.bench.lora_churn", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--socket", help="address of the socket door, where not found by the port")
    parser.add_argument("--root", type=Path, required=True, help="as --lora-root of the server")
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    return asyncio.run(run(parser.parse_args(argv)))


if __name__ == "__main__":
    sys.exit(main())
