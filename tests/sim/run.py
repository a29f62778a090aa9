"""Runs episodes of the simulation, and replays and shrinks what fails: `make sim STEPS=1000000`.

    python -m sim.run --steps N --seed S [--processes P]     many episodes
    python -m sim.run --episode SEED/NUMBER                  one of them, by its name

An episode is one scheduler with flags of its own, from its start to a whole pool at its end.
"""

import argparse
import json
import sys
import traceback
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random

from sim.clients import Clients
from sim.flags import draw_setup
from sim.shrink import shrink
from sim.situations import Situations
from sim.world import Event, Setup, World

EPISODE_STEPS = (40, 200, 1000)
TELL_EVERY = 100  # episodes
REPLAY_EVERY = 16  # episodes: a replay must give the same trace (I18)


@dataclass(slots=True)
class History:
    setup: Setup
    events: list[Event]

    def replay(self) -> World:
        """Raises what the history provokes."""
        world = World(self.setup, Situations())
        for event in self.events:
            world.apply(event)
        world.finish()
        return world


class Failure(Exception):
    """A law was broken: how it is named, what it said, and the shortest history found for it."""

    def __init__(self, name: str, error: BaseException, history: History) -> None:
        self.name = name
        self.error = error
        self.history = history
        super().__init__(self.text())

    def text(self) -> str:
        said = "".join(traceback.format_exception(self.error)[-2:])
        events = "\n".join(f"    {json.dumps(event)}," for event in self.history.events)
        return (
            f"episode {self.name} fails: {said}\n"
            f"again: PYTHONPATH=tests python -m sim.run --episode {self.name}\n"
            f"shrunk to {len(self.history.events)} events, for tests/sim/seeds.py:\n"
            f"History(\n    {json.dumps(self.history.setup)},\n  [\n{events}\n  ])"
        )


def run_episode(name: str, situations: Situations, *, replay: bool = False) -> World:
    """Raises Failure. `name` is seed/number and says everything."""
    random = Random(name)
    history = History(draw_setup(random), [])
    try:
        world = play(random, history, situations)
        if replay:
            assert history.replay().trace == world.trace, "I18: a replay decides differently"
    except Exception as error:
        raise Failure(name, error, shrunk(history, error)) from error
    return world


def play(random: Random, history: History, situations: Situations) -> World:
    """Make an episode up, write it down as it happens; raises what it provokes."""
    world = World(history.setup, situations)
    clients = Clients(random, world)
    steps = random.choice(EPISODE_STEPS)
    drain_at = random.randrange(steps) if random.random() < 0.2 else steps
    while world.driver.steps < steps:
        if world.driver.steps >= drain_at and not world.draining:
            drain = ["drain", random.choice((None, 5.0, 40.0))]
            _do(world, history, random.choice(([drain], [["launch"], drain])))
        for event in clients.round():
            _do(world, history, [event])
        if world.draining and not world.live:
            break
    world.finish()
    return world


def _do(world: World, history: History, events: Sequence[Event]) -> None:
    for event in events:
        history.events.append(event)
        world.apply(event)


def _place(error: BaseException) -> tuple[str, str, int | None]:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return type(error).__name__, frame.filename, frame.lineno


def shrunk(history: History, error: BaseException) -> History:
    """A shorter history that breaks the same law at the same line."""
    place = _place(error)

    def fails(events: Sequence[Event]) -> bool:
        try:
            History(history.setup, list(events)).replay()
        except Exception as other:
            return _place(other) == place
        return False

    if not fails(history.events):  # not even it fails again: chance has come in from outside
        return history
    return History(history.setup, shrink(history.events, fails, _matters))


def _matters(event: Event) -> bool:
    return event[0] not in ("launch", "land")


def run(seed: str, steps: int) -> Situations:
    """Episodes until so many steps are done."""
    situations, number = Situations(), 0
    while situations.steps < steps:
        world = run_episode(f"{seed}/{number}", situations, replay=number % REPLAY_EVERY == 0)
        situations.trace = zlib.crc32(world.trace.to_bytes(4), situations.trace)
        number += 1
        if number % TELL_EVERY == 0:
            print(f"seed {seed}: {situations.steps:,} steps", file=sys.stderr, flush=True)
    situations.count("episodes", number)
    return situations


def report(situations: Situations) -> str:
    lines = [f"{count:12,}  {what}" for what, count in sorted(situations.counts.items())]
    return "\n".join([f"{situations.steps:12,}  steps without a violation", *lines])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m sim.run")
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", default="0")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--episode")
    parser.add_argument("--trace", action="store_true", help="print a hash of all decisions")
    args = parser.parse_args(argv)
    try:
        if args.episode:
            run_episode(args.episode, Situations(), replay=True)
            return 0
    except Failure as failure:
        print(failure)
        return 1
    total = _run_all(args.seed, args.steps, args.processes)
    if total is None:
        return 1
    print(report(total))
    if args.trace:
        print(f"trace {total.trace:08x}")
    for what, seldom in total.missing().items():
        print(f"too seldom: {what}: {seldom}")
    return 1 if total.missing() else 0


def _part(seed: str, steps: int) -> Situations | str:
    """Of a run in several processes; a Failure crosses their border as words."""
    try:
        return run(seed, steps)
    except Failure as failure:
        return str(failure)


def _run_all(seed: str, steps: int, processes: int) -> Situations | None:
    """None where a law was broken, which is printed."""
    total = Situations()
    share = -(-steps // processes)
    seeds = [f"{seed}.{number}" for number in range(processes)]
    with ExitStack() as stack:
        parts: Iterable[Situations | str]
        if processes == 1:
            parts = [_part(seeds[0], share)]
        else:
            pool = stack.enter_context(ProcessPoolExecutor(processes))
            parts = pool.map(_part, seeds, [share] * processes)
        for part in parts:
            if isinstance(part, str):
                print(part)
                return None
            total.steps += part.steps
            total.trace ^= part.trace
            total.counts.update(part.counts)
    return total


if __name__ == "__main__":
    sys.exit(main())
