"""Wrong input at every generation route: one status, one error shape, the field by its name.

Public failures that these tables repeat: INP-01/02, SAM-03/04/11/12/16/18 to 24.
"""

import json

import pytest
from front.echo_door import Door

from tokenloom.wire.messages import TokenizedGenerateReq

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


SAMPLING = [
    ("temperature", [-0.1, 100.1, 999999, "1", True, [], {}]),
    ("top_p", [0, -1, 1.0001, "1", False]),
    ("top_k", [-2, 1 << 31, 1.5, "5", True]),
    ("min_p", [-0.1, 2]),
    ("frequency_penalty", [2.1, -2.1, "0"]),
    ("presence_penalty", [2.1, -2.1]),
    ("repetition_penalty", [0, -1, 1e9]),
    ("seed", [1.5, "1", 1 << 63, -(1 << 63) - 1]),
    ("stop", ["", [""], ["a", ""], ["x"] * 17, ["x"] * 700, "x" * 257, 5, [5], [None]]),
    ("stop_token_ids", [[-1], [256], [True], [1.5], "5", [1] * 65]),
    (
        "logit_bias",
        [
            {"AI": 1},
            {"-1": 1},
            {"256": 1},
            {"3": 101},
            {"3": -100.5},
            {"3": 1e300},
            {"3": -1e39},
            {"3": "Infinity"},
            {"3": True},
            {str(i): 0 for i in range(200)} | {f"{i:09d}": 0 for i in range(200, 256)} | {"999": 0},
            [],
        ],
    ),
    ("ignore_eos", [1, "true"]),
    ("skip_special_tokens", [0]),
    ("no_stop_trim", ["no"]),
]

LABELS = [
    ("priority", [1 << 31, -(1 << 31) - 1, 1 << 70, 1.5, "1", True, []]),
    ("user", ["u" * 257, 5, ["u"]]),
    ("cache_salt", ["", "s" * 257, 5, ["s"]]),
    ("rid", ["", "a b", "a\n", "r" * 129, 5]),
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in LABELS for value in values]
)
def test_fields_beside_prompt_and_sampling(
    door: Door, route: str, field: str, value: object
) -> None:
    answer = door.post(route, body(route) | {field: value})
    assert answer.status == 400
    assert answer.error()["param"] == field
    assert field in answer.error()["message"]
    assert door.scheduler.of(TokenizedGenerateReq) == []


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, values in SAMPLING for value in values]
)
def test_sampling_fields(door: Door, route: str, field: str, value: object) -> None:
    answer = door.post(route, body(route, **{field: value}))
    assert answer.status == 400
    error = answer.error()
    assert error["param"].split("[")[0] == field
    assert field in error["message"]
    assert error["type"] == "invalid_request_error"
    assert door.scheduler.sent == []
    assert door.post(route, body(route)).status == 200


LIMITS = [-160, -2, 0, 1.5, "5", True, 1 << 31, 1 << 63, 10**30]


@pytest.mark.parametrize(
    ("route", "field"),
    [
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        (COMPLETIONS, "max_tokens"),
        (GENERATE, "max_new_tokens"),
    ],
)
@pytest.mark.parametrize("value", LIMITS)
def test_limits_of_the_answer(door: Door, route: str, field: str, value: object) -> None:
    answer = door.post(route, body(route, **{field: value}))
    assert answer.status == 400
    error = answer.error()
    assert error["param"] == field
    assert field in error["message"]


@pytest.mark.parametrize(
    ("route", "field", "limit"),
    [
        (CHAT, "min_tokens", "max_tokens"),
        (COMPLETIONS, "min_tokens", "max_tokens"),
        (GENERATE, "min_new_tokens", "max_new_tokens"),
    ],
)
def test_least_length_above_the_limit(door: Door, route: str, field: str, limit: str) -> None:
    error = door.post(route, body(route, **{field: 6, limit: 5})).error()
    assert error["param"] == field
    assert error["message"] == f"{field} (6) is above {limit} (5)"
    for value in (-1, 1 << 40, "1"):
        assert door.post(route, body(route, **{field: value})).error()["param"] == field


@pytest.mark.parametrize("route", ROUTES)
def test_null_means_unset(door: Door, route: str) -> None:
    names = [name for name, _ in SAMPLING]
    fields = dict.fromkeys([*names, "max_tokens", "max_new_tokens", "min_tokens"])
    everything = body(route, **fields)
    everything |= dict.fromkeys(["model", "stream", "rid", "n", "tools"])
    everything |= dict.fromkeys(["priority", "user", "cache_salt", "lora_path", "logprobs"])
    answer = door.post(route, everything)
    assert answer.status == 200
    sampling = door.scheduler.of(TokenizedGenerateReq)[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.stop) == (1.0, 1.0, ())


@pytest.mark.parametrize("route", ROUTES)
def test_neutral_and_empty_values_are_no_wishes(door: Door, route: str) -> None:
    fields = {"logit_bias": {}, "stop": [], "stop_token_ids": [], "n": 1, "stop_regex": None}
    assert door.post(route, body(route, **fields)).status == 200


def test_neutral_values_that_routers_add(door: Door) -> None:
    extra = {
        "best_of": 1,
        "logprobs": False,
        "top_logprobs": 0,
        "echo": False,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "return_hidden_states": False,
        "separate_reasoning": True,
        "stream_reasoning": True,
        "continue_final_message": False,
        "chat_template_kwargs": {},
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "something_new": {"deep": [1, {"x": None}]},
    }
    assert door.post(CHAT, body(CHAT, **extra)).status == 200


UNSUPPORTED = {
    CHAT: {
        "n": [0, 2, -1, 5_000_000, True, "1"],
        "best_of": [2],
        "logprobs": [True],
        "top_logprobs": [1, 1_000_000],
        "tools": [[{"type": "function", "function": {"name": "f"}}]],
        "tool_choice": ["required", {"type": "function"}],
        "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}],
        "json_schema": ["{}"],
        "regex": ["a+"],
        "ebnf": ["root"],
        "guided_json": [{}],
        "stop_regex": ["a"],
        "bad_words": [["a"]],
        "logits_processors": [["f"]],
        "modalities": [["text", "audio"]],
        "audio": [{"voice": "x"}],
        "chat_template": ["{{ 1 }}"],
        "chat_template_kwargs": [{"tokenize": True}],
        "continue_final_message": [True],
        "add_generation_prompt": [False],
        "extra_key": ["x"],
    },
    COMPLETIONS: {
        "n": [2],
        "best_of": [2],
        "logprobs": [0, 5],
        "prompt_logprobs": [-1, 1],
        "echo": [True],
        "suffix": ["end"],
        "response_format": [{"type": "json_object"}],
        "prompt_embeds": ["x"],
    },
    GENERATE: {
        "return_logprob": [True, [True]],
        "top_logprobs_num": [1_000_000],
        "token_ids_logprob": [[-1], [1 << 40]],
        "input_embeds": [[[0.5]]],
        "image_data": ["x"],
        "session_params": [{"id": "x"}],
        "return_hidden_states": [True],
        "custom_logit_processor": ["x"],
        "extra_key": ["x"],
    },
}


@pytest.mark.parametrize(
    ("route", "field", "value"),
    [
        (route, field, value)
        for route, fields in UNSUPPORTED.items()
        for field, values in fields.items()
        for value in values
    ],
)
def test_wishes_that_cannot_be_honoured(door: Door, route: str, field: str, value: object) -> None:
    answer = door.post(route, body(route) | {field: value})
    assert answer.status == 400
    assert answer.error()["param"] == field
    assert answer.error()["message"] == f"{field} is not supported"
    assert door.scheduler.sent == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 2),
        ("n", 5_000_000),
        ("json_schema", "{}"),
        ("regex", "a"),
        ("ebnf", "a"),
        ("structural_tag", "a"),
        ("stop_regex", "a"),
        ("custom_params", {"a": 1}),
        ("spaces_between_special_tokens", False),
    ],
)
def test_native_sampling_wishes_that_cannot_be_honoured(
    door: Door, field: str, value: object
) -> None:
    for params in ({field: value}, [{}, {field: value}]):
        answer = door.post(GENERATE, {"text": ["a", "b"], "sampling_params": params})
        assert (answer.status, answer.error()["param"]) == (400, field)


BROKEN = [
    b"",
    b"{",
    b"[]",
    b"5",
    b'"text"',
    b"null",
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    "{}".encode("utf-16"),
    b'{"text": "\xff", "prompt": "\xff", "messages": []}',
    b'{"unknown": "\xff"}',
    b'{"temperature": NaN}',
    b'{"x": ' + b"[" * 1500 + b"]" * 1500 + b"}",
    b'{"x": ' + b'{"a":' * 600 + b"1" + b"}" * 600 + b"}",
    b'{"text": "a"} trailing',
    b'{"text": "a",}',
    b"{'text': 'a'}",
]


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("raw", BROKEN)
def test_bodies_that_are_no_json_object(door: Door, route: str, raw: bytes) -> None:
    answer = door.post(route, raw)
    assert answer.status == 400
    assert answer.error()["type"] == "invalid_request_error"
    assert door.post(route, body(route)).status == 200


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999", "01", "0x1"])
def test_numbers_that_json_or_float_do_not_have(door: Door, route: str, number: str) -> None:
    raw = json.dumps(body(route, temperature=7)).replace(": 7", f": {number}").encode()
    assert door.post(route, raw).status == 400


@pytest.mark.parametrize(
    ("route", "raw"),
    [
        (CHAT, b'{"messages": [{"role": "user", "content": "\\ud800"}]}'),
        (CHAT, b'{"messages": [{"role": "user", "content": "x", "name": "\\udfff"}]}'),
        (CHAT, b'{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}'),
        (COMPLETIONS, b'{"prompt": "\\ud800"}'),
        (COMPLETIONS, b'{"prompt": ["a", "\\udc00\\ud800"]}'),
        (COMPLETIONS, b'{"prompt": "a", "stop": "\\ud800"}'),
        (GENERATE, b'{"text": "\\ud800"}'),
        (GENERATE, b'{"text": "a", "rid": "\\ud800"}'),
        (GENERATE, b'{"text": "a", "unknown": "\\ud800"}'),
    ],
)
def test_lone_surrogates(door: Door, route: str, raw: bytes) -> None:
    assert door.post(route, raw).status == 400
    assert door.scheduler.sent == []
