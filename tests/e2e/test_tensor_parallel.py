"""A server of two ranks gives the answers of one process and leaves nothing behind."""

import signal
from pathlib import Path

import pytest
import torch
import transformers
from e2e.oracle import Oracle
from support.server import Server, running_server, started_server

FLAGS = ("--dtype", "float32", "--kv-tokens", "2048", "--chunked-prefill-size", "32")
PROMPTS = [[7 + 13 * seed + 5 * place for place in range(10 + 30 * seed)] for seed in range(3)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, oracle: Oracle) -> Path:
    """A random Qwen2 whose heads two ranks can share, with the embedded model's tokenizer."""
    path = tmp_path_factory.mktemp("tiny-qwen2")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=2,
        tie_word_embeddings=True,
    )
    transformers.Qwen2ForCausalLM(config).eval().save_pretrained(path)
    oracle.tokenizer.save_pretrained(path)
    return path


def answers(server: Server) -> list[list[int]]:
    """Return ids of concurrent greedy requests, a sampled one, and one that hits the cache."""
    streams = [server.stream(prompt, max_new_tokens=64, ignore_eos=True) for prompt in PROMPTS]
    found = [stream.last()["output_ids"] for stream in streams]
    for stream in streams:
        stream.leave()
    drawn = server.generate(
        PROMPTS[0], max_new_tokens=16, temperature=1.0, seed=5, top_k=50, ignore_eos=True
    )
    again = server.generate(PROMPTS[2] + [1, 2], max_new_tokens=8, ignore_eos=True)
    return [*found, drawn["output_ids"], again["output_ids"]]


@pytest.mark.slow
def test_weights_that_cannot_be_shared_out_are_refused_before_anything_is_loaded() -> None:
    with started_server("--tp", "2", "--device", "cpu") as server:
        assert server.end() == 1
        *_, last = server.log.splitlines()
        assert "--tp 2 does not share out int4 weights (--dtype auto): it needs" in last
        assert "loading" not in server.log
        server.assert_nothing_lives()


@pytest.mark.slow
def test_two_ranks_answer_like_one_process_and_end_together(tiny: Path) -> None:
    with running_server(*FLAGS, "--model", str(tiny)) as server:
        expected = answers(server)
    with running_server(*FLAGS, "--model", str(tiny), "--tp", "2") as server:
        assert "rank1" in server.alive()
        assert answers(server) == expected
        server.wait_until_idle()
    with started_server(*FLAGS, "--model", str(tiny), "--tp", "2") as server:
        server.wait_until_serving()
        with server.stream(PROMPTS[0], max_new_tokens=400, ignore_eos=True) as stream:
            assert stream.event() is not None
            server.child("rank1").send_signal(signal.SIGKILL)
            assert server.end() == 1
        server.assert_nothing_lives()
        assert "last words: rank1 ended: killed by SIGKILL" in server.log
        assert "Traceback" not in server.log
