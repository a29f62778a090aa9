"""Contents of answers: seeds in a crowd, stop strings, usage, cached tokens."""

import asyncio
from typing import Any

import httpx
import pytest
from e2e.mode import DTYPE
from support.server import PATIENCE_S, Server

from tokenloom.client import Client

pytestmark = pytest.mark.slow

TEXT = "My favourite animal is"
MODEL = "SmolLM2-135M-Instruct"


def post_all(server: Server, route: str, bodies: list[dict[str, object]]) -> list[Any]:
    """Post all bodies concurrently; return the JSON of each answer."""

    async def scenario() -> list[Any]:
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as client:
            answers = await asyncio.gather(*(client.post(route, json=body) for body in bodies))
        assert [answer.status_code for answer in answers] == [200] * len(bodies)
        return [answer.json() for answer in answers]

    return asyncio.run(scenario())


# -- seeds


def sampled(seed: int) -> dict[str, object]:
    sampling = {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01, "frequency_penalty": 0.3}
    limits = {"max_new_tokens": 16, "ignore_eos": True, "seed": seed}
    return {"text": TEXT, "sampling_params": {**sampling, **limits}}


def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(server: Server) -> None:
    alone = {seed: server.post("/generate", **sampled(seed))["output_ids"] for seed in (1, 2, 3)}
    assert len({tuple(ids) for ids in alone.values()}) == 3
    crowd = post_all(server, "/generate", [sampled(seed) for seed in (3, 9, 1, 8, 2, 7, 1, 6, 5)])
    seeds = (3, 9, 1, 8, 2, 7, 1, 6, 5)
    for seed, answer in zip(seeds, crowd, strict=True):
        if seed in alone:
            assert answer["output_ids"] == alone[seed], f"seed {seed}"


def test_a_seed_means_the_same_at_each_door(server: Server) -> None:
    native = server.generate(TEXT, temperature=1.0, seed=4, max_new_tokens=12, ignore_eos=True)
    openai = server.post(
        "/v1/completions", prompt=TEXT, temperature=1.0, seed=4, max_tokens=12, ignore_eos=True
    )
    with Client(server.door) as client:
        done = client.complete(TEXT, temperature=1.0, seed=4, max_new_tokens=12, ignore_eos=True)
    assert native["text"] == openai["choices"][0]["text"] == done.text
    assert native["output_ids"] == done.token_ids


def test_without_a_seed_answers_differ(server: Server) -> None:
    body = {"text": TEXT, "sampling_params": {"max_new_tokens": 16, "ignore_eos": True}}
    answers = post_all(server, "/generate", [body] * 4)
    assert len({tuple(answer["output_ids"]) for answer in answers}) > 1


# -- stop strings


def test_stop_strings_across_token_borders(server: Server) -> None:
    """Every 3-character piece of a long answer, as a stop string, cuts the answer before it."""
    whole = server.generate(TEXT, max_new_tokens=24, ignore_eos=True)["text"]
    assert len(whole) > 60
    stops = [whole[i : i + 3] for i in range(5, 60, 4)]
    bodies: list[dict[str, object]] = [
        {
            "text": TEXT,
            "sampling_params": {
                "temperature": 0.0,
                "max_new_tokens": 24,
                "ignore_eos": True,
                "stop": [stop],
            },
        }
        for stop in stops
    ]
    for stop, answer in zip(stops, post_all(server, "/generate", bodies), strict=True):
        assert answer["text"] == whole[: whole.index(stop)]
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}


def test_a_stream_never_shows_a_part_of_the_stop_string(server: Server) -> None:
    whole = server.generate(TEXT, max_new_tokens=24, ignore_eos=True)["text"]
    stop = whole[30:42]
    shown = []
    with server.stream(TEXT, max_new_tokens=24, ignore_eos=True, stop=[stop]) as stream:
        while (event := stream.event()) is not None:
            shown.append(event["text"])
    expected = whole[: whole.index(stop)]
    assert shown[-1] == expected
    assert all(expected.startswith(text) for text in shown)
    kept = server.generate(TEXT, max_new_tokens=24, ignore_eos=True, stop=[stop], no_stop_trim=True)
    assert kept["text"] == expected + stop


def test_the_end_token_ends_and_is_not_shown(server: Server) -> None:
    chat = [{"role": "user", "content": "Say only the word yes."}]
    answer = server.post("/v1/chat/completions", messages=chat, temperature=0, max_tokens=400)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "stop"
    assert "<|im_end|>" not in choice["message"]["content"]
    assert answer["usage"]["completion_tokens"] < 400


# -- numbers


def test_usage(server: Server) -> None:
    answer = server.post(
        "/v1/completions", prompt=[[1, 2, 3], [4, 5]], temperature=0, max_tokens=7, ignore_eos=True
    )
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 14,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]


def test_the_second_turn_of_a_chat_reuses_the_first(server: Server) -> None:
    """The second turn reuses all whole pages of the first, its answer included, but for its last
    token."""
    chat = [
        {"role": "system", "content": "You know everything about lighthouses and tell it gladly."},
        {"role": "user", "content": "Who looks after the light when its keeper sleeps?"},
    ]
    options = {"temperature": 0, "max_tokens": 40}
    first = server.post("/v1/chat/completions", messages=chat, **options)
    usage = first["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] < 16
    chat.append({"role": "assistant", "content": first["choices"][0]["message"]["content"]})
    chat.append({"role": "user", "content": "And then?"})
    second = server.post("/v1/chat/completions", messages=chat, **options)
    page = server.info()["page_size"]
    reusable = (usage["total_tokens"] - 1) // page * page
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == reusable
    before = server.stats()["cached_tokens_total"]
    again = server.post("/v1/chat/completions", messages=chat, **options)
    assert again["choices"] == second["choices"]
    cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == (second["usage"]["prompt_tokens"] - 1) // page * page
    assert server.stats()["cached_tokens_total"] == before + cached


def test_models_and_server_info(server: Server) -> None:
    models = server.http.get(f"{server.url}/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [(MODEL, 8192)]
    info = server.info()
    assert (info["dtype"], info["max_total_num_tokens"]) == (DTYPE, 16384)
    assert server.http.get(f"{server.url}/health").status_code == 200
    assert server.http.get(f"{server.url}/health_generate").status_code == 200
