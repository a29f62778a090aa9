"""The OpenAI routes answer in the exact shapes and orders that clients depend on."""

import re
from typing import Any

import pytest
from front.echo_door import MODEL, Door, submitted, turn

from tokenloom.wire.messages import Finish, StrOut, TokenizedGenerateReq

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"


def chat(content: object = "hi", **fields: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}], **fields}


def without(chunk: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in chunk.items() if name not in names}


def usage(prompt: int, completion: int, cached: int) -> dict[str, object]:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def test_a_whole_chat_answer(door: Door) -> None:
    answer = door.post(CHAT, chat(model=MODEL))
    assert (answer.status, answer.headers["content-type"]) == (200, "application/json")
    whole = answer.json()
    assert re.fullmatch(r"chatcmpl-[0-9a-f]{32}", whole["id"])
    assert isinstance(whole["created"], int)
    assert without(whole, "id", "created") == {
        "object": "chat.completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": {"content": "user:hi", "role": "assistant", "refusal": None},
                "finish_reason": "stop",
                "matched_stop": 0,
                "logprobs": None,
            }
        ],
        "usage": usage(7, 7, 3),
    }


def test_a_whole_completion(door: Door) -> None:
    whole = door.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 3}).json()
    assert re.fullmatch(r"cmpl-[0-9a-f]{32}", whole["id"])
    assert without(whole, "id", "created") == {
        "object": "text_completion",
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "text": "hel",
                "logprobs": None,
                "finish_reason": "length",
                "matched_stop": None,
            }
        ],
        "usage": usage(5, 3, 2),
    }


def test_the_order_of_a_chat_stream(door: Door) -> None:
    answer = door.post(CHAT, chat("", stream=True, max_tokens=2))
    assert answer.headers["content-type"].startswith("text/event-stream")
    *chunks, done = answer.events()
    assert done == "[DONE]"
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert {(chunk["object"], chunk["model"]) for chunk in chunks} == {
        ("chat.completion.chunk", MODEL)
    }
    assert all("usage" not in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "u"},
        {"content": "s"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "length"]


def test_usage_of_a_stream(door: Door) -> None:
    options = {"include_usage": True}
    *chunks, last, done = door.post(
        CHAT, chat("", stream=True, max_tokens=2, stream_options=options)
    ).events()
    assert done == "[DONE]"
    assert (last["choices"], last["usage"]) == ([], usage(5, 2, 2))
    assert all(chunk["usage"] is None for chunk in chunks)


def test_usage_in_every_chunk(door: Door) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last, _ = door.post(
        COMPLETIONS, {"prompt": "abc", "stream": True, "stream_options": options}
    ).events()
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [1, 2, 3]
    assert last["usage"] == usage(3, 3, 1)


def test_the_order_of_a_completion_stream(door: Door) -> None:
    *chunks, done = door.post(COMPLETIONS, {"prompt": "ab", "stream": True}).events()
    assert done == "[DONE]"
    assert [without(chunk, "id", "created") for chunk in chunks] == [
        {
            "object": "text_completion",
            "model": MODEL,
            "choices": [
                {
                    "index": 0,
                    "text": text,
                    "logprobs": None,
                    "finish_reason": finish,
                    "matched_stop": matched,
                }
            ],
        }
        for text, finish, matched in [("a", None, None), ("b", "stop", 0)]
    ]


def test_rows_without_text_send_nothing(door: Door) -> None:
    door.scheduler.hold = True

    async def scenario() -> list[Any]:
        call = door.open("POST", CHAT, chat(stream=True))
        await submitted(door)
        for row in (
            StrOut(1, "", (195,)),
            StrOut(1, "é", (169,)),
            StrOut(1, "", (), Finish("stop", "END")),
        ):
            door.scheduler.row(row)
            await turn()
        return (await call.end()).events()

    *chunks, _ = door.run(scenario())
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"].get("content") for choice in choices] == ["", "é", None]
    assert choices[-1]["finish_reason"] == "stop"
    assert choices[-1]["matched_stop"] == "END"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "c"], ["ab", "c"]),
        ([97, 98], ["ab"]),
        ([[97], [98, 99]], ["a", "bc"]),
    ],
)
def test_prompts_of_every_form(door: Door, prompt: object, texts: list[str]) -> None:
    whole = door.post(COMPLETIONS, {"prompt": prompt}).json()
    assert [choice["text"] for choice in whole["choices"]] == texts
    assert [choice["index"] for choice in whole["choices"]] == list(range(len(texts)))
    total = sum(map(len, texts))
    assert whole["usage"] == usage(total, total, sum(len(text) // 2 for text in texts))


def test_streams_of_a_list_interleave_by_index(door: Door) -> None:
    *chunks, last, done = door.post(
        COMPLETIONS,
        {"prompt": ["abc", "de"], "stream": True, "stream_options": {"include_usage": True}},
    ).events()
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["index"] for choice in choices] == [0, 1, 0, 1, 0]
    texts = ["".join(c["text"] for c in choices if c["index"] == index) for index in (0, 1)]
    assert texts == ["abc", "de"]
    assert [c["index"] for c in choices if c["finish_reason"]] == [1, 0]
    assert last["usage"] == usage(5, 5, 2)


def test_all_prompts_run_at_once_and_none_waits_to_be_read(door: Door) -> None:
    door.scheduler.hold = True

    async def scenario() -> Any:  # noqa: ANN401
        call = door.open("POST", COMPLETIONS, {"prompt": ["a", "b"]})
        await submitted(door, 2)
        for rid in (2, 1):
            for _ in range(2):
                door.scheduler.row(StrOut(rid, "x", (5,) * 3000))
                await turn()
            door.scheduler.row(StrOut(rid, "", (), Finish("length")))
        return (await call.end()).json()

    whole = door.run(scenario())
    assert [choice["text"] for choice in whole["choices"]] == ["xx", "xx"]
    assert whole["usage"]["completion_tokens"] == 12_000


def test_messages_reach_the_template(door: Door) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": [{"type": "text", "text": "a"}]},
        {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": None},
        {"role": "assistant", "tool_calls": [], "function_call": None},
        {"role": "assistant", "content": ""},
        {"role": "tool", "content": "t", "tool_call_id": "x"},
    ]
    text = door.post(CHAT, {"messages": messages}).json()["choices"][0]["message"]["content"]
    assert text == "system:s|developer:a|user:b\nc|assistant:|assistant:|assistant:|tool:t"


def test_sampling_reaches_the_scheduler(door: Door) -> None:
    door.post(
        CHAT,
        chat(
            max_completion_tokens=9,
            min_tokens=2,
            temperature=0,
            top_p=0.5,
            top_k=4,
            min_p=0.1,
            frequency_penalty=1,
            presence_penalty=-1,
            repetition_penalty=1.5,
            logit_bias={"3": -100, "4": 1.5},
            seed=-5,
            stop=["a", "b"],
            stop_token_ids=[1, 2],
            ignore_eos=True,
            skip_special_tokens=False,
            include_stop_str_in_output=True,
        ),
    )
    sampling = door.scheduler.of(TokenizedGenerateReq)[0].sampling
    values = {name: getattr(sampling, name) for name in sampling.__struct_fields__}
    assert values == {
        "max_new_tokens": 9,
        "min_new_tokens": 2,
        "temperature": 0.0,
        "top_p": 0.5,
        "top_k": 4,
        "min_p": 0.1,
        "frequency_penalty": 1.0,
        "presence_penalty": -1.0,
        "repetition_penalty": 1.5,
        "logit_bias": {3: -100.0, 4: 1.5},
        "seed": -5,
        "stop": ("a", "b"),
        "stop_token_ids": (1, 2),
        "ignore_eos": True,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }


def test_every_request_has_a_seed_of_its_own(door: Door) -> None:
    for stop in ("x", ["x"], None):
        door.post(CHAT, chat(stop=stop))
    sent = [req.sampling for req in door.scheduler.of(TokenizedGenerateReq)]
    assert [sampling.stop for sampling in sent] == [("x",), ("x",), ()]
    assert len({sampling.seed for sampling in sent}) == 3


FAILURE = Finish("error", None, "the pool broke", 500)


@pytest.mark.parametrize(
    ("finish", "status", "retry"),
    [
        (FAILURE, 500, None),
        (Finish("error", None, "draining", 503), 503, "1"),
        (Finish("error", None, "queue is full", 503, 30), 503, "30"),
        (Finish("error", None, "took too long", 408), 408, None),
        (Finish("error", None, "too long", 400), 400, None),
        (Finish("error", None, "odd status", 200), 500, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/generate"])
def test_a_failure_before_the_first_byte_is_an_http_error(
    door: Door, path: str, finish: Finish, status: int, retry: str | None, stream: bool
) -> None:
    door.scheduler.hold = True

    async def scenario() -> Any:  # noqa: ANN401
        payload = {"prompt": "x", "text": "x", "stream": stream, **chat()}
        call = door.open("POST", path, payload)
        await submitted(door)
        door.scheduler.row(StrOut(1, "", (), finish))
        return await call.end()

    answer = door.run(scenario())
    assert answer.status == status
    assert answer.error()["message"] == finish.message
    assert answer.headers.get("retry-after") == retry


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/generate"])
@pytest.mark.parametrize(
    ("finish", "code"),
    [
        (FAILURE, "internal_error"),
        (Finish("error", None, "the pool broke", 503, 9), "unavailable"),
        (Finish("error", None, "the pool broke", 408), "timeout"),
    ],
)
def test_a_failure_inside_a_stream_is_a_frame(
    door: Door, path: str, finish: Finish, code: str
) -> None:
    door.scheduler.hold = True

    async def scenario() -> Any:  # noqa: ANN401
        payload = {"prompt": "x", "text": "x", "stream": True, **chat()}
        call = door.open("POST", path, payload)
        await submitted(door)
        door.scheduler.row(StrOut(1, "a", (97,)))
        await call.until(lambda: b"a" in call.body)
        door.scheduler.row(StrOut(1, "", (), finish))
        return await call.end()

    answer = door.run(scenario())
    assert answer.status == 200
    *_, error, done = answer.events()
    assert done == "[DONE]"
    assert (error["error"]["message"], error["error"]["code"]) == ("the pool broke", code)


def test_a_time_limit_ends_a_whole_answer_with_408(door: Door) -> None:
    """Also when part of the answer has come: it is not the answer that was asked for."""
    door.scheduler.hold = True

    async def scenario() -> Any:  # noqa: ANN401
        call = door.open("POST", CHAT, chat())
        await submitted(door)
        door.scheduler.row(StrOut(1, "a", (97,)))
        door.scheduler.row(StrOut(1, "", (), Finish("error", None, "took too long", 408)))
        return await call.end()

    answer = door.run(scenario())
    assert (answer.status, answer.error()["type"]) == (408, "timeout_error")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_rid_is_the_id_of_the_answer(door: Door, path: str, stream: bool) -> None:
    payload = {"prompt": "xy", "rid": "my.rid-1", "stream": stream, **chat()}
    answer = door.post(path, payload)
    chunks = answer.events()[:-1] if stream else [answer.json()]
    assert {chunk["id"] for chunk in chunks} == {"my.rid-1"}


def test_cached_tokens_are_in_every_usage(door: Door) -> None:
    """The fake has half of each prompt in its cache."""
    options = {"include_usage": True}
    for path, count in [(CHAT, 1), (COMPLETIONS, 2)]:
        payload = {"prompt": ["abcd"] * 2, **chat(), "stream_options": options}
        whole = door.post(path, payload).json()["usage"]
        *chunks, done = door.post(path, payload | {"stream": True}).events()
        assert done == "[DONE]"
        assert chunks[-1]["usage"] == whole
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        cached = whole["prompt_tokens_details"]["cached_tokens"]
        assert cached == whole["prompt_tokens"] // 2 > 0, (path, count)


def test_one_failed_prompt_of_a_list_ends_the_others(door: Door) -> None:
    door.scheduler.hold = True

    async def scenario() -> Any:  # noqa: ANN401
        call = door.open("POST", COMPLETIONS, {"prompt": ["a", "b"]})
        await submitted(door, 2)
        door.scheduler.row(StrOut(2, "", (), FAILURE))
        return await call.end()

    assert door.run(scenario()).status == 500
    assert [type(message).__name__ for message in door.scheduler.sent][2:] == ["AbortReq"]


def test_models(door: Door) -> None:
    listed = door.call("GET", "/v1/models").json()
    assert listed["object"] == "list"
    (card,) = listed["data"]
    assert without(card, "created") == {
        "id": MODEL,
        "root": MODEL,
        "max_model_len": 256,
        "object": "model",
        "owned_by": "tokenloom",
        "parent": None,
    }
    assert door.call("GET", f"/v1/models/{MODEL}").json() == card
    missing = door.call("GET", "/v1/models/org/other:7b")
    assert (missing.status, missing.error()["code"]) == (404, "model_not_found")
