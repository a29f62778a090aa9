"""Wrong prompts, messages, names and lengths at every generation route (INP-03 to INP-10)."""

import pytest
from front.echo_door import Door

from tokenloom.wire.messages import SchedulerInfo, TokenizedGenerateReq

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"
ROUTES = (CHAT, COMPLETIONS, GENERATE)


def body(route: str, **fields: object) -> dict[str, object]:
    """A good request of `route` with sampling `fields` where the route wants them."""
    if route == CHAT:
        return {"messages": [{"role": "user", "content": "hello"}], **fields}
    if route == COMPLETIONS:
        return {"prompt": "hello", **fields}
    return {"text": "hello", "sampling_params": fields}


PROMPTS = ["", [], [""], ["a", 1], [[1], "b"], [1, [2]], 5, {}, True, None, [None], [[]], [[[1]]]]
IDS = [[-1], [256], [1, 2, 1 << 31], [1 << 63], [-(1 << 70)], [1.0], [True], [1, "a"], [[1, -1]]]


@pytest.mark.parametrize("prompt", PROMPTS + IDS)
def test_prompts_of_completions(door: Door, prompt: object) -> None:
    answer = door.post(COMPLETIONS, {"prompt": prompt})
    assert answer.status == 400
    assert answer.error()["param"].split("[")[0] == "prompt"
    assert door.front.in_flight == 0


@pytest.mark.parametrize("ids", [[], [[]], 5, "ab", {}, [None], *IDS])
def test_ids_of_generate(door: Door, ids: object) -> None:
    answer = door.post(GENERATE, {"input_ids": ids})
    assert answer.status == 400
    assert answer.error()["param"].split("[")[0] == "input_ids"


def test_an_id_out_of_range_is_named_with_its_index(door: Door) -> None:
    error = door.post(GENERATE, {"input_ids": [5, 6, 256]}).error()
    assert error["message"] == "token id 256 at index 2 is outside 0..255"


@pytest.mark.parametrize("text", ["", [], [""], ["a", ""], 5, [1], True, [["a"]]])
def test_texts_of_generate(door: Door, text: object) -> None:
    answer = door.post(GENERATE, {"text": text})
    assert answer.status == 400
    assert answer.error()["param"].split("[")[0] == "text"


def test_generate_wants_one_kind_of_prompt(door: Door) -> None:
    for payload in ({}, {"text": "a", "input_ids": [1]}, {"text": None, "input_ids": None}):
        assert door.post(GENERATE, payload).error()["param"] == "text"


@pytest.mark.parametrize(
    "rid", ["", "a b", "a\n", "x" * 129, ["a"], ["a", "b", "c"], ["a", "b\r"], 5, "é"]
)
def test_rids(door: Door, rid: object) -> None:
    answer = door.post(GENERATE, {"text": ["a", "b"], "rid": rid})
    assert (answer.status, answer.error()["param"].split("[")[0]) == (400, "rid")


def test_sampling_params_of_a_batch_must_match_it(door: Door) -> None:
    answer = door.post(GENERATE, {"text": ["a", "b"], "sampling_params": [{}]})
    assert (answer.status, answer.error()["param"]) == (400, "sampling_params")
    assert door.front.in_flight == 0


def test_one_bad_prompt_of_a_list_leaves_nothing_behind(door: Door) -> None:
    """SCH-04: a list is one call and fails as one; nothing of it is in anybody's way."""
    assert door.post(COMPLETIONS, {"prompt": [[1], [2], [256]]}).status == 400
    assert door.front.in_flight == 0
    assert door.post(COMPLETIONS, {"prompt": [[1], [2], [3]]}).status == 200


MESSAGES = [
    ([], "messages"),
    (5, "messages"),
    ("hi", "messages"),
    ([5], "messages[0]"),
    ([{"role": "system"}], "messages[0].content"),
    ([{"content": "x"}], "messages[0].role"),
    ([{"role": "userr", "content": "x"}], "messages[0].role"),
    ([{"role": "user", "content": None}], "messages[0].content"),
    ([{"role": "tool", "content": None}], "messages[0].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": []}], "messages[0].content"),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content"),
    ([{"role": "user", "content": [{"text": "a"}]}], "messages[0].content[0].type"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        "messages[0].content",
    ),
    ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
    (
        [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"id": "1"}]}],
        "messages[1].tool_calls",
    ),
]


@pytest.mark.parametrize(("messages", "param"), MESSAGES)
def test_messages(door: Door, messages: object, param: str) -> None:
    answer = door.post(CHAT, {"messages": messages})
    assert answer.status == 400
    assert answer.error()["param"] == param
    assert door.scheduler.sent == []


def test_no_messages_at_all(door: Door) -> None:
    assert door.post(CHAT, {}).error()["param"] == "messages"
    assert door.post(COMPLETIONS, {}).error()["param"] == "prompt"


def test_limits_that_contradict_each_other(door: Door) -> None:
    answer = door.post(CHAT, body(CHAT, max_tokens=3, max_completion_tokens=4))
    assert answer.error()["param"] == "max_completion_tokens"
    assert door.post(CHAT, body(CHAT, max_tokens=3, max_completion_tokens=3)).status == 200
    answer = door.post(GENERATE, body(GENERATE, seed=1, sampling_seed=2))
    assert answer.error()["param"] == "sampling_seed"


@pytest.mark.parametrize("stream", [1, "true", [], {}])
@pytest.mark.parametrize("route", ROUTES)
def test_stream_is_a_boolean(door: Door, route: str, stream: object) -> None:
    answer = door.post(route, body(route) | {"stream": stream})
    assert (answer.status, answer.error()["param"]) == (400, "stream")


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_another_model_is_404(door: Door, route: str) -> None:
    answer = door.post(route, body(route, model="gpt-4o"))
    assert answer.status == 404
    assert answer.error()["code"] == "model_not_found"
    assert answer.error()["param"] == "model"


def prompt_of(route: str, tokens: int, **sampling: object) -> dict[str, object]:
    if route == CHAT:
        content = "x" * (tokens - len("user:"))
        return {"messages": [{"role": "user", "content": content}], **sampling}
    if route == COMPLETIONS:
        return {"prompt": "x" * tokens, **sampling}
    return {"text": "x" * tokens, "sampling_params": sampling}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_prompts_at_the_edge_of_the_context(route: str, stream: bool) -> None:
    door = Door(max_body_bytes=1 << 20).start()
    for tokens, status in [(255, 200), (256, 400), (257, 400), (10_000, 400)]:
        answer = door.post(route, prompt_of(route, tokens) | {"stream": stream})
        assert answer.status == status, tokens
    assert "256" in answer.error()["message"]
    assert {req.sampling.max_new_tokens for req in door.scheduler.of(TokenizedGenerateReq)} == {1}


@pytest.mark.parametrize(
    ("route", "limit"),
    [(CHAT, "max_tokens"), (COMPLETIONS, "max_tokens"), (GENERATE, "max_new_tokens")],
)
def test_prompt_and_answer_share_the_context(door: Door, route: str, limit: str) -> None:
    assert door.post(route, prompt_of(route, 200, **{limit: 56})).status == 200
    answer = door.post(route, prompt_of(route, 200, **{limit: 57}))
    assert (answer.status, answer.error()["param"]) == (400, limit)
    assert answer.error()["message"] == (
        f"the prompt has 200 tokens and {limit} is 57; the context has 256 for both"
    )


@pytest.mark.parametrize("route", ROUTES)
def test_a_small_pool_is_the_limit_then(route: str) -> None:
    info = SchedulerInfo(256, 256, 16, 128, 8, 0, "float32", (0,))
    door = Door().start(info)
    assert door.post(route, prompt_of(route, 127)).status == 200
    answer = door.post(route, prompt_of(route, 128))
    assert answer.status == 400
    assert "the KV pool has room for 128" in answer.error()["message"]


def test_default_limits_of_the_answer(door: Door) -> None:
    for route in ROUTES:
        door.post(route, prompt_of(route, 20))
    limits = [req.sampling.max_new_tokens for req in door.scheduler.of(TokenizedGenerateReq)]
    assert limits == [236, 16, 128]
