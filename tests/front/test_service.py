"""Health, information, routing, and what the front says while it loads and drains."""

import asyncio
import logging

import msgspec
import pytest
from front.echo_door import INFO, MODEL, Door, Exchange, submitted, turn

from tokenloom.tokenizer_proc import health
from tokenloom.tokenizer_proc.doors import service
from tokenloom.tokenizer_proc.front import Front
from tokenloom.wire.messages import (
    AbortReq,
    ChildDied,
    Drained,
    DrainReq,
    Finish,
    LoopStamp,
    StrOut,
    TokenizedGenerateReq,
)

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hi"}]}
STREAMED = {"text": "a", "stream": True}
POSTS = [
    (CHAT, HELLO),
    ("/v1/completions", {"prompt": "a"}),
    ("/generate", {"text": "a"}),
    ("/generate", {"input_ids": [1]}),
]


def test_health(door: Door) -> None:
    assert (door.call("GET", "/health").status, door.call("HEAD", "/health").status) == (200, 200)
    assert door.call("GET", "/health").json() == {"status": "ready"}


def test_while_loading() -> None:
    door = Door()
    answer = door.call("GET", "/health")
    assert (answer.status, answer.json()) == (503, {"status": "loading"})
    assert answer.headers["retry-after"] == "5"
    for path, payload in POSTS:
        refused = door.post(path, payload)
        assert refused.status == 503
        assert refused.error()["message"] == "the model is loading"
        assert int(refused.headers["retry-after"]) > 0
    assert door.call("GET", "/health_generate").status == 503
    assert door.call("GET", "/v1/models").json()["data"][0]["max_model_len"] is None
    info = door.call("GET", "/get_server_info").json()
    assert (info["status"], info["context_length"], info["scheduler"]) == ("loading", None, None)


def test_a_tokenizer_alone_is_not_ready() -> None:
    door = Door()
    door.front.use_text(None, None)
    assert not door.front.ready


def test_while_draining(door: Door) -> None:
    door.scheduler.hold = True

    async def scenario() -> list[Exchange]:
        running = door.open("POST", CHAT, HELLO)
        await submitted(door)
        door.front.drain(30.0)
        door.front.drain(30.0)
        answers = [await door.open("GET", "/health").end()]
        answers += [await door.open("POST", *post).end() for post in POSTS]
        door.scheduler.row(StrOut(1, "bye", (1,), Finish("length")))
        assert (await running.end()).status == 200
        assert not door.front.drained.is_set()
        door.front.dispatch(Drained())
        assert door.front.drained.is_set()
        return answers

    health, *refused = door.run(scenario())
    assert (health.status, health.json()) == (503, {"status": "draining"})
    assert health.headers["retry-after"] == "10"
    for answer in refused:
        assert answer.status == 503
        assert answer.error()["message"] == "the server is shutting down"
        assert int(answer.headers["retry-after"]) > 0
    assert door.scheduler.of(DrainReq) == [DrainReq(30.0)]


def test_drained_leaves_nobody_waiting(door: Door) -> None:
    door.scheduler.hold = True

    async def scenario() -> Exchange:
        call = door.open("POST", CHAT, HELLO)
        await submitted(door)
        door.front.drain(1.0)
        door.front.dispatch(Drained())
        return await call.end()

    answer = door.run(scenario())
    assert answer.status == 503
    assert "stopped" in answer.error()["message"]
    assert answer.headers["retry-after"] == "10"
    assert door.front.in_flight == 0


def test_death_of_another_process_is_told_to_every_client(door: Door) -> None:
    door.scheduler.hold = True

    async def scenario() -> list[Exchange]:
        calls = [door.open("POST", CHAT, HELLO), door.open("POST", "/generate", STREAMED)]
        calls.append(door.open("GET", "/get_server_info"))
        await submitted(door, 2)
        door.scheduler.row(StrOut(2, "x", (1,)))
        await calls[1].until(lambda: bool(calls[1].body))
        door.front.dispatch(ChildDied("detokenizer", "killed by SIGKILL"))
        assert door.front.failed.is_set()
        return [await call.end() for call in [*calls, door.open("POST", CHAT, HELLO)]]

    whole, streamed, info, late = door.run(scenario())
    reason = "the server stopped before the request was finished: its detokenizer process died"
    assert whole.status == 503
    assert whole.error()["message"] == f"{reason} (killed by SIGKILL)"
    first, error, done = streamed.events()
    assert (first["text"], error["error"]["message"], done) == (
        "x",
        f"{reason} (killed by SIGKILL)",
        "[DONE]",
    )
    assert info.status == 200
    assert (late.status, late.error()["message"]) == (503, "the server is shutting down")
    assert door.front.in_flight == 0
    assert door.front.drained.is_set()


def test_health_generate(door: Door) -> None:
    assert door.call("GET", "/health_generate").status == 200
    (sent,) = door.scheduler.of(TokenizedGenerateReq)
    assert (sent.sampling.max_new_tokens, sent.sampling.greedy) == (1, True)


def test_health_generate_has_a_deadline(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "HEALTH_GENERATE_SECONDS", 0.01)
    door.scheduler.hold = True
    answer = door.call("GET", "/health_generate")
    assert answer.status == 503
    assert "no token" in answer.error()["message"]
    assert answer.headers["retry-after"] == "1"
    assert len(door.scheduler.of(AbortReq)) == 1


def silent(door: Door) -> None:
    """Nothing is heard of the scheduler for ten seconds."""
    for second in range(11):
        door.front.health.tick(float(second))


def test_health_says_what_does_not_get_on_and_liveness_does_not_care(door: Door) -> None:
    silent(door)
    answer = door.call("GET", "/health")
    reason = "the scheduler process has not been heard of for 10 s"
    assert (answer.status, answer.json()) == (503, {"status": "stuck", "reason": reason})
    assert answer.headers["retry-after"] == "1"
    probe = door.call("GET", "/health_generate")
    assert (probe.status, probe.error()["message"]) == (503, reason)
    assert door.call("GET", "/get_server_info").json()["status"] == "stuck"
    live = door.call("GET", "/livez")
    assert (live.status, live.json()) == (200, {"status": "alive"})
    assert not door.scheduler.of(TokenizedGenerateReq), "nothing is asked of a stuck scheduler"
    door.front.dispatch(LoopStamp(1, True, 0, 0.1, False))
    door.front.dispatch(LoopStamp(1, True, 0, 0.1, True))
    assert door.front.strays.total == 0
    door.front.health.tick(11.0)
    assert door.call("GET", "/health").status == 200


def test_liveness_while_loading() -> None:
    assert Door().call("GET", "/livez").status == 200


def test_health_generate_asks_nothing_of_a_busy_server(door: Door) -> None:
    door.scheduler.hold = True

    async def scenario() -> list[Exchange]:
        running = door.open("POST", CHAT, HELLO)
        await submitted(door)
        answers = [await door.open("GET", "/health_generate").end() for _ in range(3)]
        silent(door)
        answers.append(await door.open("GET", "/health_generate").end())
        running.leave()
        await running.end()
        return answers

    assert [answer.status for answer in door.run(scenario())] == [200, 200, 200, 503]
    assert len(door.scheduler.of(TokenizedGenerateReq)) == 1


def test_all_who_ask_an_idle_server_share_one_token(door: Door) -> None:
    door.scheduler.hold = True

    async def scenario() -> list[Exchange]:
        calls = [door.open("GET", "/health_generate") for _ in range(100)]
        await submitted(door)
        calls[0].leave()
        await calls[0].end()
        assert not door.scheduler.of(AbortReq), "the others still wait for it"
        door.scheduler.row(StrOut(1, "a", (97,), Finish("length")))
        return [await call.end() for call in calls[1:]]

    assert {answer.status for answer in door.run(scenario())} == {200}
    assert len(door.scheduler.of(TokenizedGenerateReq)) == 1
    assert door.front.in_flight == 0


def test_probe_of_a_scheduler_that_stops_ends_when_that_shows(door: Door) -> None:
    door.scheduler.hold = True

    async def scenario() -> Exchange:
        call = door.open("GET", "/health_generate")
        await submitted(door)
        silent(door)  # before the probe's task has begun
        await turn()
        door.front.health.tick(11.0)
        return await call.end()

    answer = door.run(scenario())
    assert answer.status == 503
    assert "the scheduler process has not been heard of" in answer.error()["message"]
    assert len(door.scheduler.of(AbortReq)) == 1
    assert not door.front.health.probe.running


def test_health_generate_reports_a_failure(door: Door) -> None:
    door.scheduler.hold = True

    async def scenario() -> Exchange:
        call = door.open("GET", "/health_generate")
        await submitted(door)
        door.scheduler.row(StrOut(1, "", (), Finish("error", None, "broken", 500)))
        return await call.end()

    assert door.run(scenario()).status == 500


def test_server_info(door: Door) -> None:
    info = door.call("GET", "/get_server_info").json()
    assert info["max_total_num_tokens"] == 1024
    assert info["internal_states"] == [{"effective_max_running_requests_per_dp": 8}]
    assert info["front"] == {"requests_in_flight": 0, "late_rows_total": 0, "strays_total": 0}
    assert (info["scheduler"]["step"], info["scheduler"]["free_rows"]) == (7, 6)
    assert (info["scheduler"]["tree_nodes"], info["scheduler"]["tree_pages"]) == (13, 14)
    assert door.call("GET", "/server_info").json()["served_model_name"] == MODEL


@pytest.mark.parametrize(
    ("events", "replay", "said"),
    [
        ("tcp://*:5557", None, ("*", 5557, 16, None)),
        ("tcp://*:5557", "tcp://*:5558", ("*", 5557, 16, 5558)),
        ("tcp://[::1]:7", None, ("[::1]", 7, 16, None)),
        ("ipc:///tmp/events", None, None),
        ("tcp://127.0.0.1:*", None, None),
        (None, None, None),
    ],
)
def test_server_info_says_where_cache_events_are(
    events: str | None, replay: str | None, said: tuple[str, int, int, int | None] | None
) -> None:
    info = msgspec.structs.replace(INFO, kv_events=events, kv_events_replay=replay)
    found = service._kv_events(info)
    assert found == (None if said is None else service.KVEvents(*said))


def test_server_info_without_an_answering_scheduler(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "STATS_SECONDS", 0.01)
    monkeypatch.setattr(door.scheduler, "send", lambda message: None)
    info = door.call("GET", "/get_server_info").json()
    assert (info["status"], info["scheduler"]) == ("ready", None)
    assert len(door.front._stats) == 0


@pytest.mark.parametrize("path", ["/get_model_info", "/model_info"])
def test_model_info(door: Door, path: str) -> None:
    assert door.call("GET", path).json() == {
        "model_path": MODEL,
        "served_model_name": MODEL,
        "tokenizer_path": MODEL,
        "is_generation": True,
    }


@pytest.mark.parametrize("path", ["/", "/docs", "/openapi.json", "/version", "/v1/", "/health/"])
def test_unknown_routes(door: Door, path: str) -> None:
    answer = door.call("GET", path)
    assert (answer.status, answer.error()["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, {"POST"}),
        ("DELETE", "/generate", {"POST", "PUT"}),
        ("HEAD", "/flush_cache", {"POST"}),  # whoever only looks changes nothing
        ("POST", "/health", {"GET", "HEAD"}),
        ("POST", "/livez", {"GET", "HEAD"}),
        ("OPTIONS", "/v1/models", {"GET", "HEAD"}),
        ("POST", "/v1/models/x", {"GET", "HEAD"}),
    ],
)
def test_wrong_methods(door: Door, method: str, path: str, allowed: set[str]) -> None:
    answer = door.call(method, path)
    assert (answer.status, answer.error()["code"]) == (405, "method_not_allowed")
    assert set(answer.headers["allow"].split(", ")) == allowed
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_surprises_stay_inside(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def explode(front: Front, *_: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(Front, "submit", explode)
    with caplog.at_level(logging.ERROR):
        answer = door.post(CHAT, HELLO)
    assert answer.status == 500
    assert b"secret" not in answer.body
    assert b"Zero" not in answer.body
    assert "secret detail" in caplog.text


def test_a_request_that_cannot_be_sent_leaves_no_session(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(message: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(door.scheduler, "send", full)
    assert door.post(CHAT, HELLO).status == 500
    assert door.front.in_flight == 0


def test_late_rows_are_counted(door: Door) -> None:
    async def scenario() -> None:
        door.scheduler.row(StrOut(77, "x", (1,)))
        await turn()

    door.run(scenario())
    assert door.front.late_rows == 1


def test_many_streams_at_once() -> None:
    door = Door(max_queued=400).start()

    async def scenario() -> list[Exchange]:
        payload = {"text": "abcdefgh", "stream": True}
        calls = [door.open("POST", "/generate", payload) for _ in range(300)]
        return await asyncio.gather(*(call.end() for call in calls))

    for answer in door.run(scenario()):
        *_, last, done = answer.events()
        assert (last["text"], done) == ("abcdefgh", "[DONE]")
    assert door.front.in_flight == 0
