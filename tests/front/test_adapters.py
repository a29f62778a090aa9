"""Adapters through the HTTP door: loaded, listed, asked for, replaced, unloaded, evicted."""

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from front.echo_door import MODEL, Door, Exchange, submitted, turn

from tokenloom.tokenizer_proc import adapters
from tokenloom.tokenizer_proc.adapters import AdapterError
from tokenloom.wire.lora_config import LoRAConfig
from tokenloom.wire.messages import (
    Drained,
    Finish,
    LoadLoRAReq,
    LoRARef,
    StrOut,
    TokenizedGenerateReq,
    UnloadLoRAReq,
)

LOAD, UNLOAD = "/load_lora_adapter", "/unload_lora_adapter"
CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with the adapters a, b and c."""
    root = tmp_path / "root"
    for name in "abc":
        (root / name).mkdir(parents=True)
    return root


def started(root: Path, **fields: Any) -> Door:  # noqa: ANN401
    return Door(lora=LoRAConfig(lora_root=(str(root),), **fields)).start()


@pytest.fixture
def door(root: Path) -> Door:
    return started(root)


def load(door: Door, name: str, path: Path | str, **fields: object) -> Exchange:
    return door.post(LOAD, {"lora_name": name, "lora_path": str(path), **fields})


def asked_for(door: Door) -> list[int]:
    """The lora_id of every request that the scheduler got."""
    return [message.lora_id for message in door.scheduler.of(TokenizedGenerateReq)]


def at_rest(door: Door) -> bool:
    """Whether no request is counted anywhere."""
    loads = door.front.adapters.registry._loads.values()
    return not any(load.holds or load.running for load in loads) and not door.front.in_flight


def say(door: Door, adapter: object, text: object = "xy") -> Exchange:
    return door.post(GENERATE, {"text": text, "lora_path": adapter})


def test_loading_and_unloading_in_sglangs_shape(door: Door, root: Path) -> None:
    answer = load(door, "n", root / "a", pinned=True)
    paths = {"n": "a"}
    assert (answer.status, answer.json()) == (
        200,
        {"loaded_adapters": paths, "success": True, "error_message": ""},
    )
    assert door.scheduler.sent == [LoadLoRAReq(LoRARef(1, "n", str(root / "a"), True))]
    answer = door.post(UNLOAD, {"lora_name": "n"})
    assert (answer.status, answer.json()["loaded_adapters"]) == (200, {})
    assert door.scheduler.sent[1:] == [UnloadLoRAReq(1)]
    assert door.post(UNLOAD, {"lora_name": "n"}).status == 404


def test_loading_and_unloading_in_vllms_shape(door: Door, root: Path) -> None:
    body = {"lora_name": "n", "lora_path": str(root / "a"), "load_inplace": True}
    answer = door.post(f"/v1{LOAD}", body)
    assert (answer.status, answer.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert answer.body == b"Success: LoRA adapter 'n' added successfully."
    answer = door.post(f"/v1{UNLOAD}", {"lora_name": "n"})
    assert answer.body == b"Success: LoRA adapter 'n' removed successfully."
    assert door.post(f"/v1{UNLOAD}", {"lora_name": "n"}).status == 404


def test_a_name_that_differs_from_its_path_works_everywhere(door: Door, root: Path) -> None:
    load(door, "n", root / "a")
    chat = {"messages": [{"role": "user", "content": "x"}]}
    for model in ("n", f"{MODEL}:n"):
        for path, body in ((CHAT, chat), (COMPLETIONS, {"prompt": ["x", "y"]})):
            answer = door.post(path, {"model": model, **body})
            assert answer.json()["model"] == model  # as it was asked for
    assert say(door, "n").status == 200
    assert asked_for(door) == [1] * 7
    for model in (MODEL, None):
        assert door.post(COMPLETIONS, {"model": model, "prompt": "x"}).json()["model"] == MODEL
    assert asked_for(door)[7:] == [0, 0]
    assert at_rest(door)


def test_one_adapter_a_prompt(door: Door, root: Path) -> None:
    load(door, "a", root / "a")
    load(door, "b", root / "b")
    answer = say(door, ["b", None, "a"], ["x", "y", "z"])
    assert [one["text"] for one in answer.json()] == ["x", "y", "z"]
    assert asked_for(door) == [2, 0, 1]
    assert say(door, "b", ["x", "y"]).status == 200
    assert asked_for(door)[3:] == [2, 2]
    assert say(door, ["a"], "x").status == 200
    wrong = say(door, ["a"], ["x", "y"])
    assert (wrong.status, wrong.error()["param"]) == (400, "lora_path")


def test_models_lists_adapters_with_their_base(door: Door, root: Path) -> None:
    load(door, "n", root / "a")
    base, adapter = door.call("GET", "/v1/models").json()["data"]
    assert (base["id"], base["parent"]) == (MODEL, None)
    assert (adapter["id"], adapter["parent"], adapter["root"]) == ("n", MODEL, MODEL)
    assert adapter["max_model_len"] == base["max_model_len"]
    assert door.call("GET", "/v1/models/n").json() == adapter
    assert door.call("GET", f"/v1/models/{MODEL}:n").json() == adapter


def test_an_unknown_name_is_told_what_is_there(door: Door, root: Path) -> None:
    for name in "ab":
        load(door, name, root / name)
    for model in ("x", f"{MODEL}:x", "other:a", "a:a", f"{MODEL}:"):
        error = door.post(COMPLETIONS, {"model": model, "prompt": "x"}).error()
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert error["message"].endswith(f"there are: {MODEL}, a, b")
    for name in ("x", "", str(root / "a"), MODEL):
        answer = say(door, name)
        assert answer.status == 404
        assert answer.error()["message"].endswith("loaded: a, b")
    assert say(door, ["a", "x"], ["x", "y"]).status == 404
    assert asked_for(door) == []
    assert at_rest(door)


def test_every_request_after_the_answer_finds_the_adapter(door: Door, root: Path) -> None:
    for index in range(50):
        assert load(door, f"n{index % 7}", root / "a").status == 200
        assert say(door, f"n{index % 7}").status == 200
    assert asked_for(door) == list(range(1, 51))


@pytest.mark.parametrize(
    "name", ["", "a b", "a/b", "a\nb", "a:b", ".a", "n" * 129, "ä", MODEL, None, 7]
)
def test_names_that_are_refused(door: Door, root: Path, name: object) -> None:
    answer = door.post(LOAD, {"lora_name": name, "lora_path": str(root / "a")})
    assert (answer.status, answer.error()["param"]) == (400, "lora_name")
    assert door.scheduler.sent == []


@pytest.mark.parametrize("path", ["", "a\0b", "x" * 2000, "/", "/etc", "..", "../other", None, 7])
def test_paths_that_are_refused(door: Door, root: Path, path: object) -> None:
    (root.parent / "other").mkdir()
    answer = door.post(LOAD, {"lora_name": "n", "lora_path": path})
    assert (answer.status, answer.error()["param"]) == (400, "lora_path")
    assert door.scheduler.sent == []


def test_other_bodies_that_are_refused(door: Door, root: Path) -> None:
    body = {"lora_name": "n", "lora_path": str(root / "a")}
    for field, value in (("pinned", "yes"), ("added_tokens_config", {"x": 1})):
        answer = door.post(LOAD, body | {field: value})
        assert (answer.status, answer.error()["param"]) == (400, field)
    assert door.post(LOAD, b"[]").status == 400
    assert door.post(UNLOAD, {}).error()["param"] == "lora_name"
    assert door.call("GET", LOAD).status == 405


def test_paths_are_resolved_and_then_looked_at(door: Door, root: Path) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    (root / "out").symlink_to(outside)
    (root / "in").symlink_to(root / "a")
    for path in (root / "out", "out", root / "a" / ".." / ".." / "outside", f"{root}2"):
        assert load(door, "n", path).status == 400
    for path in ("a", root / "in", "in", root / "b" / ".." / "a", f"{root}//a/"):
        assert load(door, "n", path).json()["loaded_adapters"] == {"n": "a"}
    missing = load(door, "n", root / "missing")
    assert (missing.status, missing.error()["code"]) == (404, "not_found")


def test_without_a_root_only_what_was_served_from_the_start(root: Path) -> None:
    door = Door(lora=LoRAConfig(lora=(f"n={root / 'a'}",)))

    async def scenario() -> list[int]:
        door.start()
        await door.front.load_first_adapters()
        bodies = [{"lora_name": "m", "lora_path": str(root / name)} for name in "ab"]
        return [(await door.open("POST", LOAD, body).end()).status for body in bodies]

    assert door.run(scenario()) == [200, 400]


@pytest.mark.parametrize(("said", "heard"), [(400, 400), (404, 404), (409, 409), (0, 500)])
def test_a_load_that_fails_leaves_no_trace(door: Door, root: Path, said: int, heard: int) -> None:
    door.scheduler.bad[str(root / "a")] = (said, "lora_A of layer 3 is missing")
    answer = load(door, "n", root / "a")
    assert (answer.status, answer.error()["message"]) == (heard, "lora_A of layer 3 is missing")
    assert len(door.call("GET", "/v1/models").json()["data"]) == 1
    assert say(door, "n").status == 404
    assert load(door, "n", root / "b").status == 200


def test_a_load_that_takes_too_long_goes_on(
    door: Door, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapters, "LORA_LOAD_SECONDS", 0.01)
    door.scheduler.hold_loads = True
    answer = load(door, "n", root / "a")
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert load(door, "n", root / "a").status == 409
    assert say(door, "n").status == 404
    (asked,) = door.scheduler.of(LoadLoRAReq)
    door.scheduler.loaded(asked.ref)
    assert say(door, "n").status == 200


async def loading(door: Door, count: int = 1) -> LoRARef:
    """Until the scheduler was asked for `count` loads; the last one."""
    async with asyncio.timeout(10):
        while len(door.scheduler.of(LoadLoRAReq)) < count:
            await turn()  # the path is looked at in a thread
    return door.scheduler.of(LoadLoRAReq)[-1].ref


def test_a_client_that_leaves_does_not_end_its_load(door: Door, root: Path) -> None:
    door.scheduler.hold_loads = True

    async def scenario() -> None:
        call = door.open("POST", LOAD, {"lora_name": "n", "lora_path": str(root / "a")})
        ref = await loading(door)
        call.leave()
        await call.end()
        assert not call.status
        door.scheduler.loaded(ref)

    door.run(scenario())
    assert say(door, "n").status == 200


def test_replacing_an_adapter_under_a_name_in_use(door: Door, root: Path) -> None:
    load(door, "n", root / "a")
    door.scheduler.hold = True

    async def scenario() -> list[Exchange]:
        calls = [door.open("POST", GENERATE, {"text": "x", "lora_path": "n"})]
        await submitted(door, 1)
        replaced = door.open("POST", LOAD, {"lora_name": "n", "lora_path": str(root / "b")})
        assert (await replaced.end()).json()["loaded_adapters"] == {"n": "b"}
        calls.append(door.open("POST", GENERATE, {"text": "y", "lora_path": "n"}))
        await submitted(door, 2)
        assert door.scheduler.there == {1, 2}
        assert door.scheduler.leaving == {1}
        for rid in (1, 2):
            door.scheduler.row(StrOut(rid, "z", (1,), Finish("stop")))
        return [await call.end() for call in calls]

    assert [call.status for call in door.run(scenario())] == [200, 200]
    assert asked_for(door) == [1, 2]
    assert door.scheduler.there == {2}
    assert at_rest(door)


def test_requests_of_an_unloaded_adapter_end_well(door: Door, root: Path) -> None:
    load(door, "n", root / "a")
    door.scheduler.hold = True

    async def scenario() -> Exchange:
        call = door.open("POST", GENERATE, {"text": "x", "lora_path": "n"})
        await submitted(door, 1)
        assert (await door.open("POST", UNLOAD, {"lora_name": "n"}).end()).status == 200
        late = await door.open("POST", GENERATE, {"text": "x", "lora_path": "n"}).end()
        assert late.status == 404
        door.scheduler.row(StrOut(1, "z", (1,), Finish("stop")))
        return await call.end()

    assert door.run(scenario()).json()["text"] == "z"
    assert door.scheduler.there == set()
    assert door.front.adapters.registry._loads == {}


def few(root: Path) -> Door:
    """With room for one adapter, and a and b loaded: a is evicted."""
    door = started(root, max_loaded_loras=1, max_loras_per_batch=1)
    for name in "ab":
        assert load(door, name, root / name).status == 200
    assert door.scheduler.there == {2}
    return door


def test_an_evicted_adapter_comes_back_when_it_is_asked_for(root: Path) -> None:
    door = few(root)
    assert say(door, "a").json()["text"] == "xy"
    assert door.scheduler.of(LoadLoRAReq)[-1].ref == LoRARef(3, "a", str(root / "a"))
    assert asked_for(door) == [3]
    assert door.scheduler.there == {3}
    assert [card["id"] for card in door.call("GET", "/v1/models").json()["data"][1:]] == ["a", "b"]
    assert at_rest(door)


def test_an_unknown_name_is_found_before_anything_is_loaded(root: Path) -> None:
    door = few(root)
    assert say(door, ["a", "x"], ["x", "y"]).status == 404
    assert len(door.scheduler.of(LoadLoRAReq)) == 2


def test_many_requests_wait_for_one_load(root: Path) -> None:
    door = few(root)
    door.scheduler.hold_loads = True

    async def scenario() -> list[int]:
        calls = [door.open("POST", GENERATE, {"text": "x", "lora_path": "a"}) for _ in range(3)]
        ref = await loading(door, 3)
        gone = door.open("POST", GENERATE, {"text": "x", "lora_path": "a"})
        for _ in range(20):
            await turn()
        gone.leave()
        await gone.end()
        door.scheduler.loaded(ref)
        return [(await call.end()).status for call in calls]

    assert door.run(scenario()) == [200, 200, 200]
    assert asked_for(door) == [3, 3, 3]
    assert at_rest(door)


def test_an_adapter_that_does_not_come_back(root: Path) -> None:
    door = few(root)
    door.scheduler.bad[str(root / "a")] = (404, "no such file")
    answer = say(door, "a")
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
    assert answer.error()["message"].endswith("'a' could not be loaded again: no such file")
    assert say(door, ["b", "a"], ["x", "y"]).status == 503  # b is loaded again and stays held
    del door.scheduler.bad[str(root / "a")]
    assert say(door, "a").status == 200
    assert at_rest(door)


def test_waiting_for_loads_is_bounded(root: Path) -> None:
    door = few(root)
    door.scheduler.hold_loads = True
    door.front.adapters._max_waiting = 1

    async def scenario() -> Exchange:
        first = door.open("POST", GENERATE, {"text": "x", "lora_path": "a"})
        ref = await loading(door, 3)
        second = await door.open("POST", GENERATE, {"text": "x", "lora_path": "a"}).end()
        door.scheduler.loaded(ref)
        assert (await first.end()).status == 200
        return second

    second = door.run(scenario())
    assert (second.status, second.error()["message"]) == (
        503,
        "1 requests wait for adapters to be loaded",
    )
    assert at_rest(door)


def test_more_adapters_in_one_call_than_have_room(root: Path) -> None:
    door = few(root)
    answer = say(door, ["b", "a"], ["x", "y"])
    assert answer.status == 503
    assert "all 1 adapters in memory are pinned or in use" in answer.error()["message"]
    assert asked_for(door) == []
    assert at_rest(door)


def test_counts_end_at_zero_however_requests_end(door: Door, root: Path) -> None:
    load(door, "n", root / "a")
    door.scheduler.hold = True

    async def scenario() -> None:
        def ask(texts: list[str]) -> Exchange:
            return door.open("POST", GENERATE, {"text": texts, "lora_path": "n"})

        leaves = ask(["x", "y"])
        await submitted(door, 2)
        leaves.leave()
        await leaves.end()
        breaks = ask(["x", "y"])
        await submitted(door, 4)
        door.scheduler.row(StrOut(4, "", (), Finish("error", None, "no", 500)))
        assert (await breaks.end()).status == 500
        ends = ask(["x"])
        await submitted(door, 5)
        door.scheduler.row(StrOut(5, "z", (1,), Finish("stop")))
        assert (await ends.end()).status == 200
        lost = ask(["x"])
        await submitted(door, 6)
        assert door.front.adapters.registry.running() == {1: 1}
        door.front.drain(1.0)
        door.front.dispatch(Drained())
        assert (await lost.end()).status == 503

    door.run(scenario())
    assert at_rest(door)


def test_a_refused_prompt_of_a_batch_releases_the_others(door: Door, root: Path) -> None:
    load(door, "n", root / "a")
    sampling = [{"temperature": 0}, {"temperature": -1}]
    body = {"text": ["x", "y"], "sampling_params": sampling, "lora_path": "n"}
    assert door.post(GENERATE, body).status == 400
    assert asked_for(door) == [1]
    assert at_rest(door)


def test_a_request_that_cannot_be_sent_is_not_counted(
    door: Door, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(door, "n", root / "a")

    def broken(message: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(door.scheduler, "send", broken)
    assert say(door, "n").status == 500
    assert at_rest(door)


def test_while_the_model_loads_and_when_the_scheduler_ends(root: Path) -> None:
    loading_door = Door(lora=LoRAConfig(lora_root=(str(root),)))
    body = {"lora_name": "n", "lora_path": str(root / "a")}
    for path, given in (
        (LOAD, body),
        (UNLOAD, body),
        (GENERATE, {"text": "x", "lora_path": "n"}),
        (COMPLETIONS, {"prompt": "x", "model": "n"}),
    ):
        assert loading_door.post(path, given).status == 503
    door = started(root)
    door.scheduler.hold_loads = True

    async def scenario() -> Exchange:
        call = door.open("POST", LOAD, body)
        await loading(door)
        door.front.drain(1.0)
        door.front.dispatch(Drained())
        return await call.end()

    assert door.run(scenario()).status == 503


def test_flags_may_say_home(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(root.parent))
    door = Door(lora=LoRAConfig(lora_root=("~/root",), lora=("n=~/root/a",)))
    first(door, door.front.load_first_adapters())
    assert load(door, "m", "b").json()["loaded_adapters"] == {"n": "a", "m": "b"}


def first(door: Door, work: Coroutine[Any, Any, None]) -> None:
    async def scenario() -> None:
        door.start()
        await work

    door.run(scenario())


def test_adapters_of_the_command_line_come_before_the_first_request(root: Path) -> None:
    flags = (f"n={root / 'a'}", f"m={root / 'b'},pinned")
    door = Door(lora=LoRAConfig(lora=flags))

    async def work() -> None:
        door.scheduler.hold_loads = True
        starting = asyncio.create_task(door.front.load_first_adapters())
        for count in (1, 2):
            assert not door.front.ready
            assert (await door.open("POST", GENERATE, {"text": "x"}).end()).status == 503
            door.scheduler.loaded(await loading(door, count))
        await starting
        assert door.front.ready

    first(door, work())
    assert [message.ref for message in door.scheduler.of(LoadLoRAReq)] == [
        LoRARef(1, "n", str(root / "a")),
        LoRARef(2, "m", str(root / "b"), pinned=True),
    ]
    assert say(door, "m").status == 200


def test_an_adapter_of_the_command_line_that_fails_stops_the_start(root: Path) -> None:
    door = Door(lora=LoRAConfig(lora=(f"n={root / 'a'}",)))
    door.scheduler.bad[str(root / "a")] = (400, "rank 99 is above 64")
    with pytest.raises(AdapterError, match=r"^--lora n=.*/a: rank 99 is above 64$"):
        first(door, door.front.load_first_adapters())
    assert not door.front.ready


def test_an_adapter_may_not_have_the_name_of_the_model(root: Path) -> None:
    door = Door(lora=LoRAConfig(lora=(f"{MODEL}={root / 'a'}",)))
    with pytest.raises(AdapterError, match="the name of the base model"):
        first(door, door.front.load_first_adapters())


def test_the_scheduler_may_come_after_the_question(root: Path) -> None:
    door = Door(lora=LoRAConfig(lora=(f"n={root / 'a'}",)))

    async def scenario() -> None:
        door.scheduler.hold_loads = True
        starting = asyncio.create_task(door.front.load_first_adapters())
        ref = await loading(door)
        door.start()
        assert not door.front.ready
        door.scheduler.loaded(ref)
        await starting
        assert door.front.ready

    door.run(scenario())


@pytest.mark.parametrize("seed", range(4))
def test_churn_ends_with_nothing_counted(root: Path, seed: int) -> None:
    """Four names behind room for two; the fake scheduler refuses ids that it does not have."""
    door = started(root, max_loaded_loras=2, max_loras_per_batch=2)
    dice = random.Random(seed)
    statuses: Counter[int] = Counter()

    async def once() -> None:
        name = dice.choice(["n0", "n1", "n2", "n3"])
        body: dict[str, object] = {"lora_name": name, "lora_path": dice.choice("abc")}
        kind = dice.choice([UNLOAD, *[LOAD] * 5, *[GENERATE] * 24])
        if kind == GENERATE:
            adapters = [name, None, dice.choice(["n0", "n1"])][: dice.randint(1, 3)]
            body = {"text": ["x" * 20] * len(adapters), "lora_path": adapters}
        call = door.open("POST", kind, body)
        for _ in range(dice.randint(0, 30)):
            await turn()
        if dice.random() < 0.3:
            call.leave()
        await call.end()
        statuses[call.status] += 1

    async def worker() -> None:
        for _ in range(40):
            await once()

    async def scenario() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(8):
                group.create_task(worker())
        async with asyncio.timeout(10):
            while door.front.in_flight or door.scheduler.leaving or door.front.adapters._coming:
                await turn()

    door.run(scenario())
    assert at_rest(door)
    registry = door.front.adapters.registry
    assert door.scheduler.there == set(registry._loads)
    assert set(statuses) <= {0, 200, 404, 409, 503}
    assert statuses[200] > 40


def test_no_answer_names_the_servers_own_folders(root: Path, tmp_path: Path) -> None:
    """Neither a success nor a failure, nor the reason that the scheduler gives."""
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    door = Door(lora=LoRAConfig(lora_root=(str(root),), lora=(f"own={outside}",)))
    first(door, door.front.load_first_adapters())
    door.scheduler.bad[str(root / "b")] = (400, f"{root / 'b'}/adapter_config.json: no rank")
    answers = [load(door, "n", path) for path in (root / "a", root / "b", "nowhere", outside)]
    assert answers[0].json()["loaded_adapters"] == {"own": "elsewhere", "n": "a"}
    assert answers[1].error()["message"] == "b/adapter_config.json: no rank"
    assert all(str(tmp_path).encode() not in answer.body for answer in answers)
