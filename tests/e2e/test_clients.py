"""Common client libraries against the real server, several kinds at one time."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator

import openai
import pytest
from support.server import PATIENCE_S, Server

from tokenloom.client import Client

pytestmark = pytest.mark.slow

MODEL = "SmolLM2-135M-Instruct"
CHAT = [{"role": "user", "content": "Name three colours."}]
TEXT = "The capital of France is"
LIMIT = 12


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    url = f"{server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client


def test_openai_client(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    chat = client.chat.completions.create(
        model=MODEL, messages=CHAT, temperature=0, max_tokens=LIMIT
    )
    text = chat.choices[0].message.content
    assert text
    assert chat.choices[0].finish_reason == "length"
    assert chat.usage.completion_tokens == LIMIT
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + LIMIT
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=CHAT,
            temperature=0,
            max_tokens=LIMIT,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == text
    assert len([piece for piece in pieces if piece]) > 3, "the answer came in pieces"
    assert chunks[-1].usage.completion_tokens == LIMIT
    assert chunks[-1].usage.prompt_tokens == chat.usage.prompt_tokens

    whole = client.completions.create(model=MODEL, prompt=TEXT, temperature=0, max_tokens=LIMIT)
    assert "Paris" in whole.choices[0].text
    stream = client.completions.create(
        model=MODEL, prompt=TEXT, temperature=0, max_tokens=LIMIT, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text


def test_async_openai_client(server: Server) -> None:
    async def scenario() -> None:
        url = f"{server.url}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=PATIENCE_S) as client:
            chat, text = client.chat.completions, client.completions
            whole, streamed, completion, pieces = await asyncio.gather(
                chat.create(model=MODEL, messages=CHAT, temperature=0, max_tokens=LIMIT),
                chat.create(
                    model=MODEL, messages=CHAT, temperature=0, max_tokens=LIMIT, stream=True
                ),
                text.create(model=MODEL, prompt=TEXT, temperature=0, max_tokens=LIMIT),
                text.create(model=MODEL, prompt=TEXT, temperature=0, max_tokens=LIMIT, stream=True),
            )
            got = [chunk.choices[0].delta.content or "" async for chunk in streamed]
            assert "".join(got) == whole.choices[0].message.content
            got = [chunk.choices[0].text async for chunk in pieces]
            assert "".join(got) == completion.choices[0].text

    asyncio.run(scenario())


def test_openai_client_hears_errors_in_its_own_terms(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=CHAT, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-4o", messages=CHAT)


def test_curl_streams_while_a_socket_client_streams(server: Server) -> None:
    story = [{"role": "user", "content": "Write a long story about a dog and a lighthouse."}]
    body = {"messages": story, "max_tokens": 80, "temperature": 0, "stream": True}
    content_type = ("-H", "Content-Type: application/json")
    curl = subprocess.Popen(
        [
            "curl",
            "-sSN",
            f"{server.url}/v1/chat/completions",
            *content_type,
            "-d",
            json.dumps(body),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert curl.stdout is not None
    with Client(server.door) as client, curl.stdout:
        answer = client.generate(messages=story, max_new_tokens=80, temperature=0.0)
        deltas = iter(answer)
        next(deltas)
        assert curl.stdout.readline().startswith("data: ")
        assert server.stats()["running"] == 2, "both are in the middle of their answers"
        rest = list(deltas)
        data = [line.removeprefix("data: ").strip() for line in curl.stdout if line.strip()]
    assert curl.wait(PATIENCE_S) == 0
    assert len(rest) > 20
    assert data[-1] == "[DONE]"
    chunks = [json.loads(line) for line in data[:-1]]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == answer.text
    assert len([chunk for chunk in chunks if chunk["choices"][0]["delta"]]) > 20


def test_socket_clients(server: Server) -> None:
    """Sync socket clients, whole and streamed, find the door by port and get HTTP's answers."""
    expected = server.generate(TEXT, max_new_tokens=LIMIT)
    with Client(server.door) as client:
        assert client.ping().model == MODEL
        done = client.complete(TEXT, max_new_tokens=LIMIT, temperature=0.0)
        assert done.text == expected["text"]
        assert done.token_ids == expected["output_ids"]
        assert (done.finish_reason, done.usage.completion_tokens) == ("length", LIMIT)
        answer = client.generate(
            input_ids=[504, 3575, 282, 4649, 314], max_new_tokens=LIMIT, temperature=0.0
        )
        assert "".join(delta.text for delta in answer) == done.text


def test_chat_in_a_pipe(server: Server) -> None:
    """`tokenloom chat` answers line by line, and the second answer sees the first turn."""
    questions = ["Name three colours.", "Which of them do you like?"]
    sampling = ["--temperature", "0", "--repetition-penalty", "1", "--max-new-tokens", str(LIMIT)]
    flags = ["--address", server.door, *sampling]
    chat = subprocess.run(
        [sys.executable, "-m", "tokenloom", "chat", *flags],
        input="".join(f"{question}\n" for question in questions),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    said, answers = [], []
    with Client(server.door) as client:
        for question in questions:
            said.append({"role": "user", "content": question})
            done = client.complete(messages=said, max_new_tokens=LIMIT, temperature=0.0)
            said.append({"role": "assistant", "content": done.text})
            answers.append(f"{done.text}\n")
    assert chat.stdout == "".join(answers)
    assert not chat.stderr
