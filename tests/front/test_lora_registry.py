"""The registry of adapters: what names mean, who may have what, and counts that end at zero."""

from collections.abc import Callable
from typing import TypeVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tokenloom.tokenizer_proc import lora_registry
from tokenloom.tokenizer_proc.errors import IllegalMove, Refused
from tokenloom.tokenizer_proc.lora_registry import BASE, LoRARegistry, NoSuchAdapter
from tokenloom.wire.messages import LoadLoRAReq, LoRALoaded, LoRARef, UnloadLoRAReq


def ready(registry: LoRARegistry, name: str, path: str = "/x", *, pinned: bool = False) -> int:
    """Load `name`; its lora_id."""
    ref, words = registry.load(name, path, pinned=pinned)
    assert words[-1] == LoadLoRAReq(ref)
    registry.loaded(LoRALoaded(ref.lora_id, True))
    return ref.lora_id


def running(registry: LoRARegistry, name: str) -> int:
    """A request for `name` that is in the scheduler; its lora_id."""
    ref, words = registry.hold(name)
    assert words == []
    registry.admit(ref.lora_id)
    assert registry.unhold(ref.lora_id) == []
    return ref.lora_id


def test_a_name_is_seen_only_when_it_is_loaded() -> None:
    registry = LoRARegistry(2)
    ref, words = registry.load("a", "/x", pinned=True)
    assert (ref, words) == (LoRARef(1, "a", "/x", True), [LoadLoRAReq(ref)])
    assert registry.names() == []
    with pytest.raises(NoSuchAdapter, match=r"'a'.*loaded: none"):
        registry.hold("a")
    assert registry.loaded(LoRALoaded(1, True)) == []
    assert registry.names() == ["a"]
    assert registry.paths() == {"a": "/x"}
    assert registry.hold("a") == (ref, [])


def test_a_second_load_while_one_is_coming_is_refused() -> None:
    registry = LoRARegistry(2)
    registry.load("a", "/x", pinned=False)
    for call in (lambda: registry.load("a", "/y", pinned=False), lambda: registry.unload("a")):
        with pytest.raises(Refused, match="is being loaded") as refused:
            call()
        assert refused.value.status == 409


def test_a_failed_load_leaves_no_trace() -> None:
    registry = LoRARegistry(1)
    ref, _ = registry.load("a", "/x", pinned=True)
    assert registry.loaded(LoRALoaded(ref.lora_id, False, "rank 99", 400)) == []
    assert registry.names() == []
    assert registry._names == {}
    with pytest.raises(NoSuchAdapter):
        registry.unload("a")
    assert ready(registry, "b") == 2  # its place is free, its id is not


def test_unloading_forgets_the_name_at_once_and_requests_go_on() -> None:
    registry = LoRARegistry(2)
    ready(registry, "a")
    lora_id = running(registry, "a")
    assert registry.unload("a") == [UnloadLoRAReq(lora_id)]
    with pytest.raises(NoSuchAdapter):
        registry.hold("a")
    assert registry.running() == {lora_id: 1}
    registry.release(lora_id)
    registry.unloaded(lora_id)
    assert registry.running() == {}
    assert ready(registry, "a") == 2


def test_a_name_in_use_switches_when_the_new_load_is_ready() -> None:
    registry = LoRARegistry(1)  # the name counts once
    old = ready(registry, "a", "/x")
    assert running(registry, "a") == old
    ref, words = registry.load("a", "/y", pinned=False)
    assert words == [LoadLoRAReq(ref)]
    assert running(registry, "a") == old
    assert registry.loaded(LoRALoaded(ref.lora_id, True)) == [UnloadLoRAReq(old)]
    assert running(registry, "a") == ref.lora_id
    assert registry.paths() == {"a": "/y"}
    assert registry.running() == {old: 2, ref.lora_id: 1}


def test_a_name_keeps_its_meaning_when_the_new_load_fails() -> None:
    registry = LoRARegistry(1)
    old = ready(registry, "a", "/x")
    ref, _ = registry.load("a", "/y", pinned=True)
    assert registry.loaded(LoRALoaded(ref.lora_id, False, "no", 400)) == []
    assert registry.hold("a")[0] == LoRARef(old, "a", "/x", False)


def test_the_scheduler_is_told_only_when_no_request_will_name_the_load_again() -> None:
    registry = LoRARegistry(1)
    ready(registry, "a")
    ref, _ = registry.hold("a")
    assert registry.unload("a") == []
    registry.admit(ref.lora_id)
    assert registry.unhold(ref.lora_id) == [UnloadLoRAReq(ref.lora_id)]
    with pytest.raises(IllegalMove, match="a request while draining"):
        registry.admit(ref.lora_id)


def test_the_longest_idle_one_leaves_and_comes_back_when_asked_for() -> None:
    registry = LoRARegistry(2)
    first, second = ready(registry, "a", "/a"), ready(registry, "b", "/b")
    registry.release(running(registry, "a"))  # now b is idle for longer
    ref, words = registry.load("c", "/c", pinned=False)
    assert words == [UnloadLoRAReq(second), LoadLoRAReq(ref)]
    registry.loaded(LoRALoaded(ref.lora_id, True))
    assert registry.names() == ["a", "b", "c"]
    back, words = registry.hold("b")
    assert back == LoRARef(4, "b", "/b")
    assert words == [UnloadLoRAReq(first), LoadLoRAReq(back)]
    assert registry.hold("b") == (back, [])  # the next one waits for the same load
    registry.loaded(LoRALoaded(back.lora_id, True))
    registry.admit(back.lora_id)


def test_an_evicted_name_survives_a_load_that_fails() -> None:
    registry = LoRARegistry(1)
    ready(registry, "a", "/a")
    ready(registry, "b")
    back, _ = registry.hold("a")
    registry.loaded(LoRALoaded(back.lora_id, False, "unreadable", 404))
    with pytest.raises(IllegalMove, match="a request while failed"):
        registry.admit(back.lora_id)
    assert registry.unhold(back.lora_id) == []
    assert registry.hold("a")[0] == LoRARef(4, "a", "/a")


@pytest.mark.parametrize("kind", ["pinned", "held", "running", "coming"])
def test_no_room_is_said_where_none_can_leave(kind: str) -> None:
    registry = LoRARegistry(1)
    if kind == "coming":
        registry.load("a", "/x", pinned=False)
    else:
        ready(registry, "a", pinned=kind == "pinned")
    if kind == "held":
        registry.hold("a")
    if kind == "running":
        running(registry, "a")
    with pytest.raises(Refused, match="all 1 adapters in memory are pinned or in use") as refused:
        registry.load("b", "/x", pinned=False)
    assert refused.value.status == 409
    assert "b" not in registry.names()


def test_a_request_that_finds_no_room_may_try_again() -> None:
    registry = LoRARegistry(1)
    ready(registry, "a")
    ready(registry, "b", pinned=True)
    with pytest.raises(Refused, match="no room") as refused:
        registry.hold("a")
    assert (refused.value.status, refused.value.retry_after) == (503, 1)


def test_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_registry, "MAX_KNOWN_LORAS", 2)
    registry = LoRARegistry(1)
    for name in "ab":
        ready(registry, name)
    with pytest.raises(Refused, match="2 adapters are known") as refused:
        registry.load("c", "/x", pinned=False)
    assert refused.value.status == 409
    assert ready(registry, "a") == 3


def test_a_long_list_of_names_is_cut() -> None:
    registry = LoRARegistry(30)
    for index in range(23):
        ready(registry, f"n{index}")
    with pytest.raises(NoSuchAdapter, match=r"n0, n1, .*n19 and 3 more$"):
        registry.hold("x" * 5000)


def test_illegal_moves_tell_their_story() -> None:
    registry = LoRARegistry(1)
    lora_id = ready(registry, "a")
    with pytest.raises(IllegalMove, match="loading -> ready: rank 0; ready -> ready"):
        registry._load_of(lora_id).move(lora_registry.LoadState.READY, "again")
    with pytest.raises(IllegalMove, match="no load 9"):
        registry.unloaded(9)
    with pytest.raises(IllegalMove, match="ended twice"):
        registry.release(lora_id)
    with pytest.raises(IllegalMove, match="once too often"):
        registry.unhold(lora_id)
    with pytest.raises(IllegalMove, match="with 0 holds"):
        registry.admit(lora_id)


def test_the_base_model_is_not_counted() -> None:
    registry = LoRARegistry(1)
    registry.admit(BASE)
    registry.release(BASE)
    assert registry.running() == {}


NAMES = ("a", "b", "c", "d")
T = TypeVar("T")


def tried(call: Callable[[], T], otherwise: T) -> tuple[T, int]:
    """What `call` gives and 200, or `otherwise` and the status of its refusal."""
    try:
        return call(), 200
    except Refused as refused:
        return otherwise, refused.status


class Adapters(RuleBasedStateMachine):
    """Any order of loads, answers, requests, their ends and unloads; the scheduler is a model."""

    MAX = 2

    def __init__(self) -> None:
        super().__init__()
        self.registry = LoRARegistry(self.MAX)
        self.asked: dict[int, LoRARef] = {}  # loads without an answer
        self.there: dict[int, LoRARef] = {}  # what the scheduler has, until it is freed
        self.leaving: set[int] = set()
        self.seen: set[int] = set()
        self.held: list[int] = []
        self.running: list[int] = []

    def hear(self, words: lora_registry.Words) -> None:
        for word in words:
            match word:
                case LoadLoRAReq(ref=ref):
                    assert ref.lora_id not in self.seen, "an id was used again"
                    self.seen.add(ref.lora_id)
                    self.asked[ref.lora_id] = ref
                case UnloadLoRAReq(lora_id=lora_id):
                    assert lora_id in self.there
                    assert lora_id not in self.leaving, "said twice"
                    assert lora_id not in self.held, "a request is still to come"
                    self.leaving.add(lora_id)

    @rule(name=st.sampled_from(NAMES), path=st.sampled_from(["/x", "/y"]), pinned=st.booleans())
    def load(self, name: str, path: str, pinned: bool) -> None:
        (_, words), status = tried(
            lambda: self.registry.load(name, path, pinned=pinned), (None, [])
        )
        assert status in (200, 409)
        self.hear(words)

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), ok=st.booleans())
    def answer(self, data: st.DataObject, ok: bool) -> None:
        ref = self.asked.pop(data.draw(st.sampled_from(sorted(self.asked))))
        if ok:
            self.there[ref.lora_id] = ref
        before = self.registry.paths()
        self.hear(self.registry.loaded(LoRALoaded(ref.lora_id, ok, "" if ok else "no", 400)))
        after = self.registry.paths()
        assert after == (before | {ref.name: ref.path} if ok else before)

    @rule(name=st.sampled_from(NAMES))
    def unload(self, name: str) -> None:
        known = name in self.registry.names()
        words, status = tried(lambda: self.registry.unload(name), [])
        self.hear(words)
        coming = any(ref.name == name for ref in self.asked.values())
        assert status == (409 if coming else 200 if known else 404)
        assert (name in self.registry.names()) == (known and coming)

    @rule(name=st.sampled_from(NAMES))
    def hold(self, name: str) -> None:
        promised = self.registry.paths()
        (ref, words), status = tried(lambda: self.registry.hold(name), (None, []))
        assert status in ((200, 503) if name in promised else (404,))
        self.hear(words)
        if ref is not None:
            self.held.append(ref.lora_id)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def submit(self, data: st.DataObject) -> None:
        lora_id = data.draw(st.sampled_from(self.held))
        if lora_id not in self.there:
            with pytest.raises(IllegalMove):
                self.registry.admit(lora_id)
            return
        assert lora_id not in self.leaving
        self.registry.admit(lora_id)
        self.running.append(lora_id)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        lora_id = data.draw(st.sampled_from(self.held))
        self.held.remove(lora_id)
        self.hear(self.registry.unhold(lora_id))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        lora_id = data.draw(st.sampled_from(self.running))
        self.running.remove(lora_id)
        self.registry.release(lora_id)

    @precondition(lambda self: self.leaving - set(self.running))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        lora_id = data.draw(st.sampled_from(sorted(self.leaving - set(self.running))))
        self.leaving.discard(lora_id)
        del self.there[lora_id]
        self.registry.unloaded(lora_id)

    @invariant()
    def counts_are_those_of_the_requests(self) -> None:
        counts = {lora_id: self.running.count(lora_id) for lora_id in self.running}
        assert self.registry.running() == counts

    @invariant()
    def no_more_names_are_in_memory_than_may_be(self) -> None:
        names = {ref.name for ref in self.asked.values()}
        told = self.leaving | set(self.held)  # the old load of a name may be held when it leaves
        names |= {ref.name for lora_id, ref in self.there.items() if lora_id not in told}
        assert len(names) <= self.MAX

    @invariant()
    def pinned_ones_stay(self) -> None:
        for key, ref in self.there.items():
            if ref.pinned and key in self.leaving:
                newer = self.registry._names.get(ref.name)
                assert newer is None or newer.ref.lora_id > key

    def teardown(self) -> None:
        """When all has ended and all is unloaded, nothing is left."""
        for lora_id in self.running:
            self.registry.release(lora_id)
        self.running.clear()
        for lora_id, ref in list(self.asked.items()):
            self.there[lora_id] = ref
            self.hear(self.registry.loaded(LoRALoaded(lora_id, True)))
        held, self.held = self.held, []
        for lora_id in held:
            self.hear(self.registry.unhold(lora_id))
        for name in self.registry.names():
            self.hear(self.registry.unload(name))
        assert self.leaving == set(self.there)
        for lora_id in self.leaving:
            self.registry.unloaded(lora_id)
        assert self.registry._loads == {}
        assert self.registry.running() == {}


TestAdapters = Adapters.TestCase
TestAdapters.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)
