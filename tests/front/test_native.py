"""/generate answers in SGLang's shape."""

import re

from front.echo_door import Door

from tokenloom.wire.messages import TokenizedGenerateReq

GENERATE = "/generate"


def test_a_whole_answer(door: Door) -> None:
    answer = door.post(GENERATE, {"text": "hey", "rid": "my.rid-1:a_B"}).json()
    latency = answer["meta_info"].pop("e2e_latency")
    assert 0 <= latency < 10
    assert answer == {
        "text": "hey",
        "output_ids": [104, 101, 121],
        "meta_info": {
            "id": "my.rid-1:a_B",
            "finish_reason": {"type": "stop", "matched": 0},
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "cached_tokens": 1,
        },
    }


def test_put_is_post(door: Door) -> None:
    assert door.call("PUT", GENERATE, {"text": "hey"}).json()["text"] == "hey"


def test_ids_and_a_limit(door: Door) -> None:
    payload = {"input_ids": [97, 98, 99], "sampling_params": {"max_new_tokens": 2}}
    answer = door.post(GENERATE, payload).json()
    assert answer["text"] == "ab"
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 2}
    assert re.fullmatch(r"[0-9a-f]{32}", answer["meta_info"]["id"])


def test_a_stream_is_cumulative(door: Door) -> None:
    *events, done = door.post(GENERATE, {"text": "hey", "stream": True}).events()
    assert done == "[DONE]"
    assert [event["text"] for event in events] == ["h", "he", "hey"]
    assert [event["output_ids"] for event in events] == [[104], [104, 101], [104, 101, 121]]
    assert [event["meta_info"]["completion_tokens"] for event in events] == [1, 2, 3]
    reasons = [event["meta_info"]["finish_reason"] for event in events]
    assert reasons == [None, None, {"type": "stop", "matched": 0}]
    assert "index" not in events[0]


def test_batches_answer_with_lists(door: Door) -> None:
    answers = door.post(GENERATE, {"text": ["a", "bc"], "rid": ["x", "y"]}).json()
    assert [answer["text"] for answer in answers] == ["a", "bc"]
    assert [answer["meta_info"]["id"] for answer in answers] == ["x", "y"]
    answers = door.post(GENERATE, {"input_ids": [[97], [98]], "rid": "r"}).json()
    assert [answer["meta_info"]["id"] for answer in answers] == ["r_0", "r_1"]
    assert len(door.post(GENERATE, {"text": ["a"]}).json()) == 1
    assert len(door.post(GENERATE, {"input_ids": [[97]]}).json()) == 1


def test_a_batch_streams_by_index(door: Door) -> None:
    *events, done = door.post(GENERATE, {"text": ["ab", "c"], "stream": True}).events()
    assert done == "[DONE]"
    assert [(event["index"], event["text"]) for event in events] == [(0, "a"), (1, "c"), (0, "ab")]


def test_sampling_of_each_prompt(door: Door) -> None:
    params = [{"max_new_tokens": 1}, {"sampling_seed": 7, "min_new_tokens": 1}, {"seed": 8}]
    door.post(GENERATE, {"text": ["ab", "c", "d"], "sampling_params": params})
    sent = [req.sampling for req in door.scheduler.of(TokenizedGenerateReq)]
    assert [sampling.max_new_tokens for sampling in sent] == [1, 128, 128]
    assert [sampling.seed for sampling in sent[1:]] == [7, 8]


def test_what_benches_send_along(door: Door) -> None:
    payload = {
        "text": "hey",
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 2, "ignore_eos": True},
        "stream": True,
        "lora_path": None,
        "return_logprob": False,
        "return_routed_experts": False,
        "logprob_start_len": -1,
        "model": None,
    }
    assert door.post(GENERATE, payload).status == 200
