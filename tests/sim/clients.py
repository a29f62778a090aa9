"""Makes histories up: bursts of requests, ends at every boundary, results that come late.

All chance is one random.Random. What is drawn depends on the world's state, so that ends hit live
requests in every state; the events drawn say everything, so that a replay needs no chance at all.
"""

from random import Random
from typing import Any

from sim.world import Event, World

from tokenloom.bench.simulation.step_time import StepTime

LATE_ENDS = 24  # rids that ended lately and may be ended again


class Clients:
    """One episode's crowd. Its habits are drawn once, so that episodes differ from each other."""

    def __init__(self, random: Random, world: World) -> None:
        self._random = random
        self._world = world
        self._next_rid = 1
        self._crowd = random.choice((1, 2, 2, 3, 6)) * world.num_rows
        self._burst = random.choice((0.0, 0.0, 0.02, 0.1, 0.3))  # 0: only when all are gone
        self._idle = random.choice((0.0, 0.5))
        self._ends = random.choice((0.0, 0.01, 0.05, 0.2))
        self._late = random.choice((0.0, 0.3, 0.8))  # how often messages come during a step
        self._broken = random.choice((0.0, 0.0, 0.02))
        self._shared = random.choice((0.0, 0.5, 0.9))
        self._pause = random.choice((0.0, 0.02))
        self._flush = random.choice((0.0, 0.05))
        self._lasts = StepTime(
            step=random.choice((1e-4, 8e-3, 0.5)),
            row=random.choice((0.0, 1e-5, 3e-4)),
            token=random.choice((0.0, 3e-5, 2e-3, 0.1)),
            context_token=random.choice((0.0, 1e-6)),
        )
        self._mismeasured = random.choice((0.0, 0.0, 0.05, 1.0))
        self._next_lora = 1
        self._adapted = random.choice((0.0, 0.3, 0.8))  # how often a request names an adapter
        self._loads = random.choice((0.002, 0.02, 0.1)) if self._adapted else 0.0
        self._unloads = random.choice((0.0, 0.02, 0.05))
        self._names = "aabcdefg"
        self._adapters = 1  # to be there at any time
        self._popular = 0.5  # how often the oldest of them is asked for
        if "adapters" in world.setup:
            self._crowd_adapters(world.setup["adapters"])
        learns = world.setup["learns"]
        self._short = random.choice((0.2, 0.8, 0.95)) if learns else 0.95
        self._long = random.choice((0.0, 0.5, 0.9)) if learns else 0.9
        self._texts = random.choice((1, 2, 4))  # that requests share
        self._lengths = self._borders()

    def _crowd_adapters(self, adapters: int) -> None:
        """Requests for more adapters than there are slots never cease; one may be far ahead."""
        self._adapters, self._names = adapters, "abcdefghijkl"[:adapters]
        self._adapted, self._loads, self._unloads = 0.9, 0.002, 0.002
        self._crowd, self._burst = max(self._world.setup["crowd"], self._crowd), 0.1
        self._popular = self._random.choice((0.0, 0.8, 0.95))

    def round(self) -> list[Event]:
        """The events of one step, drawn as they are applied by the caller, one list at a time."""
        random = self._random
        during = random.random() < self._late
        events: list[Event] = [] if during else self._messages()
        events.append(["launch"])
        if during:
            events += self._messages()
        broken = list(self._world.live) if random.random() < self._broken else []
        events.append(["land", random.sample(broken, min(len(broken), 1)), self._seconds()])
        return events

    def _seconds(self) -> float:
        """How long the step that lands next has taken, as the scheduler is told."""
        if self._random.random() < self._mismeasured:
            return self._random.choice((0.0, -1.0, 1e-9, 1e-3, 3.0, 1e5, 1e300))
        flying = self._world.driver.in_flight
        return self._lasts(flying[0][0]) if flying else 0.0

    def _messages(self) -> list[Event]:
        random, live = self._random, self._world.live
        events: list[Event] = []
        if not live or (len(live) < self._crowd and random.random() < self._burst):
            events += [self._submit() for _ in range(random.randint(1, self._crowd - len(live)))]
        while random.random() < self._ends:
            events.append([random.choice(("abort", "stop")), self._someone()])
            if random.random() < 0.2:
                events.append(["abort", events[-1][1]])
        if random.random() < 0.02:
            events.append(["stats"])
        if random.random() < self._pause:
            events.append(["time", random.choice((0.5, 2.0, 10.0))])
        if random.random() < self._flush:
            events.append(["flush", random.choice((0.0, 3.0, 50.0))])
        events += self._adapter_messages()
        if random.random() < 0.002:
            events.append(["again", self._someone()])
        random.shuffle(events)
        if not live and random.random() < self._idle:
            events.insert(0, ["idle"])
        return events

    def _adapter_messages(self) -> list[Event]:
        """Names are few, so that most loads replace one; some loads last."""
        random, adapters = self._random, self._world.adapters
        events: list[Event] = []
        if self._adapted and len(adapters.serving) + len(adapters.loading) < self._adapters:
            events.append(self._load())
        while random.random() < self._loads:
            events.append(self._load())
        if adapters.loads and random.random() < self._unloads:
            events.append(["unload", self._some_adapter(0.9)])
        if adapters.loading and random.random() < 0.3:
            events.append(["loaded", random.choice((1, 1, 2, 9))])
        if adapters.loads and random.random() < 0.001:
            events.append(["load", random.choice(list(adapters.loads)), "a", False])
        return events

    def _load(self) -> Event:
        lora_id, self._next_lora = self._next_lora, self._next_lora + 1
        name, fails = self._random.choice(self._names), self._random.random() < 0.1
        return ["load", lora_id, name, fails]

    def _some_adapter(self, there: float) -> int:
        """One that serves, or else one that is loading, gone or never was."""
        random, serving = self._random, self._world.adapters.serving
        if serving and random.random() < there:
            return serving[0] if random.random() < self._popular else random.choice(serving)
        return random.randint(1, self._next_lora)

    def _someone(self) -> int:
        """Mostly somebody live, rare states before others; else one that ended or never was."""
        random, live = self._random, list(self._world.live)
        if (rare := self._world.in_rare_states()) and random.random() < 0.3:
            return random.choice(rare)
        if live and random.random() < 0.9:
            return random.choice((live[0], live[-1], random.choice(live)))
        return random.randint(max(1, self._next_rid - LATE_ENDS), self._next_rid + 1)

    def _submit(self) -> Event:
        random = self._random
        rid, self._next_rid = self._next_rid, self._next_rid + 1
        text: dict[str, Any] = {"prefix": random.randrange(self._texts), "shared": 0, "own": 0}
        if rid > 3 and random.random() < 0.15:
            text.update(after=rid - random.randint(1, 3), own=random.randint(1, 3))
        elif random.random() < self._shared:
            text.update(shared=self._prompt_length(), own=random.choice((0, 1, 2, 5)))
        else:
            text["own"] = self._prompt_length()
        wishes: dict[str, Any] = {}
        if random.random() < 0.8:
            wishes["max_new"] = self._answer_length()
        if random.random() < 0.7:
            wishes["ignore_eos"] = True
        wishes["priority"] = random.choice((0, 0, 0, 1, 2, -1))
        tenant = random.choice(("a", "a", "a", "b", "c"))
        wishes["tenant"] = f"{tenant}{rid}" if self._world.setup.get("crowd", 0) > 256 else tenant
        wishes["namespace"] = str(random.randrange(self._world.setup["namespaces"]))
        if random.random() < self._adapted:
            wishes["lora_id"] = self._some_adapter(0.98)
        elif self._adapted and random.random() < 0.1:  # that of an adapter, if one could name it
            wishes["namespace"] = f"{self._some_adapter(1.0)}/0"
        if random.random() < 0.1:
            wishes["stop_ids"] = [random.randrange(97) for _ in range(4)]
        return ["submit", rid, text, wishes]

    def _answer_length(self) -> int:
        """Long answers beside each other are what pools overflow by."""
        random, longest = self._random, self._world.longest
        if random.random() < self._long:
            return random.randint(longest // 4 + 1, longest * 2 // 3 + 1)
        return random.choice((1, 2, random.choice(self._lengths) + 1, random.randint(1, 40)))

    def _prompt_length(self) -> int:
        """At borders, or where most of the context is left for the answer."""
        if self._random.random() < self._short:
            return self._random.randint(1, max(1, self._world.longest // 3))
        return self._random.choice(self._lengths)

    def _borders(self) -> list[int]:
        """Lengths at which something could be off by one; short ones are more frequent."""
        world = self._world
        page, longest = world.page_size, world.longest
        near = (page, 2 * page, world.budget, world.budget + page, longest // 2, longest - 1)
        lengths = [max(0, at + by) for at in near for by in (-1, 0, 1)]
        fitting = [length for length in lengths if length < longest]
        return fitting + fitting + lengths + [1, 2, 3, 5, 8] * 3
