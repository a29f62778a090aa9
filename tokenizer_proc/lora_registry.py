"""LoRARegistry: adapter names, their loads, and the requests that use each load. PURE.

Owned by `adapters.Adapters`; `front.Front` counts requests in it. A name has at most one load that
requests get and one that is being loaded; every load has a `lora_id` that is never reused. The
registry decides and returns the messages for the scheduler; its caller sends them and waits. Paths
are not checked here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from ..wire.messages import LoadLoRAReq, LoRALoaded, LoRARef, UnloadLoRAReq
from .errors import IllegalMove, NoSuchAdapter, Refused
from .limits import MAX_KNOWN_LORAS

BASE = 0  # the lora_id of requests without an adapter; never counted

Words = Sequence[LoadLoRAReq | UnloadLoRAReq]  # messages for the scheduler, in this order


class LoadState(Enum):
    LOADING = "loading"  # LoadLoRAReq was sent
    READY = "ready"
    RETIRED = "retired"  # replaced or unloaded, but held by requests not submitted yet
    DRAINING = "draining"  # UnloadLoRAReq was sent: freed after its last request
    GONE = "gone"
    FAILED = "failed"


_MOVES: dict[LoadState, frozenset[LoadState]] = {
    LoadState.LOADING: frozenset({LoadState.READY, LoadState.FAILED}),
    LoadState.READY: frozenset({LoadState.RETIRED}),
    LoadState.RETIRED: frozenset({LoadState.DRAINING}),
    LoadState.DRAINING: frozenset({LoadState.GONE}),
    LoadState.GONE: frozenset(),
    LoadState.FAILED: frozenset(),
}
_OVER = (LoadState.GONE, LoadState.FAILED)


@dataclass(slots=True, eq=False)
class Load:
    """One load of an adapter, from LoadLoRAReq until the scheduler has freed it."""

    ref: LoRARef
    state: LoadState = LoadState.LOADING
    holds: int = 0  # requests not submitted yet
    running: int = 0  # requests submitted and not ended
    last_used: int = 0
    story: list[str] = field(default_factory=list)

    def move(self, to: LoadState, why: str) -> None:
        self.story.append(f"{self.state.value} -> {to.value}: {why}")
        if to not in _MOVES[self.state]:
            raise self.wrong("; ".join(self.story))
        self.state = to

    def wrong(self, what: str) -> IllegalMove:
        return IllegalMove(f"adapter {self.ref.name!r}, load {self.ref.lora_id}: {what}")


@dataclass(slots=True, eq=False)
class _Name:
    ref: LoRARef  # the last successful load; the first load of a new name
    visible: bool = False  # a load has succeeded
    current: Load | None = None  # the load that requests get; None if visible: evicted
    coming: Load | None = None


class LoRARegistry:
    def __init__(self, max_loaded: int) -> None:
        self._max_loaded = max_loaded
        self._names: dict[str, _Name] = {}
        self._loads: dict[int, Load] = {}  # not freed, or still used by requests
        self._last_id = BASE
        self._ticks = 0

    def names(self) -> list[str]:
        """Return the names that requests may use, evicted ones included."""
        return [name for name, known in self._names.items() if known.visible]

    def paths(self) -> dict[str, str]:
        return {name: known.ref.path for name, known in self._names.items() if known.visible}

    def __contains__(self, name: str) -> bool:
        known = self._names.get(name)
        return known is not None and known.visible

    def ref(self, lora_id: int) -> LoRARef:
        return self._load_of(lora_id).ref

    def require(self, name: str) -> None:
        """Raise NoSuchAdapter unless requests may use `name`."""
        if name not in self:
            raise NoSuchAdapter(name, self.names())

    # -- loads

    def load(self, name: str, path: str, *, pinned: bool) -> tuple[LoRARef, Words]:
        """Reserve `name` for a new load; its current load stays until the new one is ready.

        Raises Refused with 409.
        """
        known = self._names.get(name)
        if known is not None and known.coming is not None:
            raise Refused(409, f"the adapter {name!r} is being loaded")
        if known is None and len(self._names) >= MAX_KNOWN_LORAS:
            raise Refused(409, f"{MAX_KNOWN_LORAS} adapters are known here; unload some")
        return self._begin(name, path, pinned=pinned, full=409)

    def state(self, lora_id: int) -> LoadState | None:
        """Return the load's state; None if it is unknown or over."""
        load = self._loads.get(lora_id)
        return None if load is None else load.state

    def loaded(self, answer: LoRALoaded) -> Words:
        """Process LoRALoaded: point the name at this load, or discard a failed one."""
        load = self._load_of(answer.lora_id)
        known = self._names[load.ref.name]
        if not answer.ok:
            load.move(LoadState.FAILED, answer.message)
            known.coming = None
            if not known.visible:
                del self._names[load.ref.name]
            self._forget_if_over(load)
            return []
        load.move(LoadState.READY, f"rank {answer.rank}")
        old, known.current, known.coming = known.current, load, None
        known.ref, known.visible = load.ref, True
        self._touch(load)
        return [] if old is None else self._retire(old, "another load has its name")

    def unload(self, name: str) -> Words:
        """Remove `name` at once. Raises NoSuchAdapter, or Refused with 409 while it is loading."""
        self._check_unload(name)
        load = self._names.pop(name).current
        return [] if load is None else self._retire(load, "unloaded")

    def unloaded(self, lora_id: int) -> None:
        """Process LoRAUnloaded: the scheduler has freed the load."""
        load = self._load_of(lora_id)
        load.move(LoadState.GONE, "freed")
        self._forget_if_over(load)

    # -- requests

    def hold(self, name: str) -> tuple[LoRARef, Words]:
        """Hold the load of `name` for a request until `unhold`; reload an evicted adapter.

        The load may not be ready yet. Raises NoSuchAdapter, or Refused with 503 when there is no
        room.
        """
        self.require(name)
        known = self._names[name]
        load = known.current or known.coming
        words: Words = []
        if load is None:
            ref, words = self._begin(name, known.ref.path, pinned=known.ref.pinned, full=503)
            load = self._loads[ref.lora_id]
        load.holds += 1
        self._touch(load)
        return load.ref, words

    def unhold(self, lora_id: int) -> Words:
        load = self._load_of(lora_id)
        if not load.holds:
            raise load.wrong("let go of once too often")
        load.holds -= 1
        self._forget_if_over(load)
        return self._tell_if_free(load)

    def admit(self, lora_id: int) -> None:
        """Count a request submitted with this load, which must be held and ready."""
        if lora_id == BASE:
            return
        load = self._load_of(lora_id)
        if not load.holds or load.state not in (LoadState.READY, LoadState.RETIRED):
            raise load.wrong(f"a request while {load.state.value} with {load.holds} holds")
        load.running += 1
        self._touch(load)

    def release(self, lora_id: int) -> None:
        """Count the end of a request with this load; once for every `admit`."""
        if lora_id == BASE:
            return
        load = self._load_of(lora_id)
        if not load.running:
            raise load.wrong("a request ended twice")
        load.running -= 1
        self._forget_if_over(load)

    def running(self) -> dict[int, int]:
        """Return lora_id -> running requests, for all loads with any."""
        return {lora_id: load.running for lora_id, load in self._loads.items() if load.running}

    # -- inside

    def _begin(self, name: str, path: str, *, pinned: bool, full: int) -> tuple[LoRARef, Words]:
        words: list[LoadLoRAReq | UnloadLoRAReq] = [*self._make_room(name, full)]
        self._last_id += 1
        ref = LoRARef(self._last_id, name, path, pinned)
        load = self._loads[ref.lora_id] = Load(ref)
        self._names.setdefault(name, _Name(ref)).coming = load
        return ref, [*words, LoadLoRAReq(ref)]

    def _make_room(self, name: str, full: int) -> Words:
        """Evict adapters until `name` fits; a name counts once, however many loads it has."""
        taken = {key: known for key, known in self._names.items() if known.current or known.coming}
        taken.pop(name, None)
        if len(taken) < self._max_loaded:
            return []
        idle = [load for known in taken.values() if (load := _evictable(known))]
        if not idle:
            raise Refused(
                full, f"all {self._max_loaded} adapters in memory are pinned or in use; no room"
            )
        victim = min(idle, key=lambda load: load.last_used)
        self._names[victim.ref.name].current = None
        return self._retire(victim, "evicted")

    def _check_unload(self, name: str) -> None:
        known = self._names.get(name)
        if known is not None and known.coming is not None:
            raise Refused(409, f"the adapter {name!r} is being loaded")
        self.require(name)

    def _retire(self, load: Load, why: str) -> Words:
        load.move(LoadState.RETIRED, why)
        return self._tell_if_free(load)

    def _tell_if_free(self, load: Load) -> Words:
        if load.state is not LoadState.RETIRED or load.holds:
            return []
        load.move(LoadState.DRAINING, "no request will name it again")
        return [UnloadLoRAReq(load.ref.lora_id)]

    def _touch(self, load: Load) -> None:
        self._ticks += 1
        load.last_used = self._ticks

    def _load_of(self, lora_id: int) -> Load:
        load = self._loads.get(lora_id)
        if load is None:
            raise IllegalMove(f"there is no load {lora_id} of an adapter")
        return load

    def _forget_if_over(self, load: Load) -> None:
        if load.state in _OVER and not load.holds and not load.running:
            del self._loads[load.ref.lora_id]


def _evictable(known: _Name) -> Load | None:
    load = known.current
    if load is None or known.coming is not None or load.ref.pinned:
        return None
    return None if load.holds or load.running else load
