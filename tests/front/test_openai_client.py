"""The openai Python client on a real uvicorn of the door: sync and async, whole and streamed."""

import asyncio
import http.client
import threading
from collections.abc import Iterator

import openai
import pytest
from front.echo_door import MODEL, Served, turn

from tokenloom.wire.messages import AbortReq, Finish, StrOut, TokenizedGenerateReq

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.stop()


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_whole_answers(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model=MODEL, messages=HELLO)
    assert chat.choices[0].message.content == "user:hello"
    assert chat.choices[0].finish_reason == "stop"
    assert chat.usage.prompt_tokens_details.cached_tokens == 5
    text = client.completions.create(model=MODEL, prompt=["ab", "cd"], max_tokens=1)
    assert [choice.text for choice in text.choices] == ["a", "c"]
    assert text.usage.total_tokens == 6


def test_streams(client: openai.OpenAI) -> None:
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=HELLO, stream=True, stream_options=options
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "user:hello"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == 10
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 5
    pieces = client.completions.create(model=MODEL, prompt="abc", stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == "abc"


def test_async(served: Served) -> None:
    async def scenario() -> None:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            chat = await client.chat.completions.create(model=MODEL, messages=HELLO)
            assert chat.choices[0].message.content == "user:hello"
            stream = await client.chat.completions.create(model=MODEL, messages=HELLO, stream=True)
            texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(texts) == "user:hello"
            whole = await client.completions.create(model=MODEL, prompt="abc")
            assert whole.choices[0].text == "abc"
            stream = await client.completions.create(model=MODEL, prompt="abc", stream=True)
            assert "".join([chunk.choices[0].text async for chunk in stream]) == "abc"

    asyncio.run(scenario())


def test_labels(served: Served, client: openai.OpenAI) -> None:
    fields = {"priority": 3, "cache_salt": "mine"}
    client.chat.completions.create(model=MODEL, messages=HELLO, user="ada", extra_body=fields)
    sent = served.door.scheduler.of(TokenizedGenerateReq)[-1]
    assert (sent.priority, sent.tenant, sent.namespace) == (3, "ada", "mine")
    client.chat.completions.create(model=MODEL, messages=HELLO)
    sent = served.door.scheduler.of(TokenizedGenerateReq)[-1]
    assert sent.tenant.startswith("token-")


def test_errors_have_the_clients_types(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model=MODEL, messages=HELLO, temperature=101)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=HELLO)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.APIStatusError) as large:
        client.completions.create(model=MODEL, prompt="x" * (5 << 20))
    assert large.value.status_code == 413
    assert client.models.retrieve(MODEL).id == MODEL
    assert [model.id for model in client.models.list()] == [MODEL]


def test_an_error_inside_a_stream_raises(served: Served, client: openai.OpenAI) -> None:
    served.door.scheduler.hold = True
    try:
        stream = iter_later(served, client)
        with pytest.raises(openai.APIError, match="broke"):
            list(stream)
    finally:
        served.door.scheduler.hold = False


@pytest.mark.parametrize(
    ("finish", "kind", "retry"),
    [
        (Finish("error", None, "the queue is full", 503, 7), openai.InternalServerError, "7"),
        (Finish("error", None, "it took too long", 408), openai.APIStatusError, None),
    ],
)
def test_refusals_of_the_scheduler(
    served: Served,
    client: openai.OpenAI,
    finish: Finish,
    kind: type[openai.APIStatusError],
    retry: str | None,
) -> None:
    served.door.scheduler.hold = True
    try:
        fail_later(served, finish)
        with pytest.raises(kind, match=finish.message) as refused:
            client.chat.completions.create(model=MODEL, messages=HELLO)
        assert refused.value.status_code == finish.status
        assert refused.value.response.headers.get("retry-after") == retry
    finally:
        served.door.scheduler.hold = False


def iter_later(served: Served, client: openai.OpenAI) -> Iterator[object]:
    """A stream whose request the scheduler fails after its first row."""
    fail_later(served, Finish("error", None, "it broke", 500), "a")
    return iter(client.chat.completions.create(model=MODEL, messages=HELLO, stream=True))


def fail_later(served: Served, finish: Finish, first: str = "") -> None:
    """The scheduler fails the next request, after a row of text if there is some."""
    scheduler = served.door.scheduler
    seen = len(scheduler.sent)

    async def play() -> None:
        while len(scheduler.sent) == seen:
            await turn()
        rid = scheduler.sent[-1].rid
        if first:
            scheduler.row(StrOut(rid, first, (97,)))
            await turn()
            await turn()
        scheduler.row(StrOut(rid, "", (), finish))

    asyncio.run_coroutine_threadsafe(play(), served.loop)


@pytest.mark.parametrize("stream", [b"true", b"false"])
def test_a_closed_connection_aborts(served: Served, stream: bytes) -> None:
    scheduler = served.door.scheduler
    scheduler.hold = True
    seen = len(scheduler.of(AbortReq))
    submitted, aborted = threading.Event(), threading.Event()

    async def watch() -> None:
        before = len(scheduler.sent)
        async with asyncio.timeout(20):
            while len(scheduler.sent) == before:
                await turn()
            submitted.set()
            while len(scheduler.of(AbortReq)) == seen:
                await turn()
            aborted.set()

    try:
        watching = asyncio.run_coroutine_threadsafe(watch(), served.loop)
        connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=20)
        connection.request("POST", "/generate", b'{"text": "x", "stream": ' + stream + b"}")
        assert submitted.wait(20)
        connection.close()
        assert aborted.wait(20)
        watching.result(20)
    finally:
        scheduler.hold = False


def test_garbage_on_the_port(served: Served) -> None:
    for raw in (b"\x00\xff\xfe", b"GET /health HTTP/9.9\r\n\r\n", b"GET / HTTP/1.1\r\nx\r\n\r\n"):
        connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=20)
        connection.connect()
        connection.sock.sendall(raw + b"\r\n\r\n")
        assert connection.sock.recv(100)[:12] in (b"HTTP/1.1 400", b"HTTP/1.1 200")
        connection.close()


def test_a_chunked_body_over_the_limit(served: Served) -> None:
    connection = http.client.HTTPConnection(served.url.removeprefix("http://"), timeout=20)
    pieces = (b" " * (1 << 20) for _ in range(5))
    connection.request("POST", "/generate", pieces, encode_chunked=True)
    answer = connection.getresponse()
    assert answer.status == 413
    assert b"request_too_large" in answer.read()
    connection.request("GET", "/health")  # the connection is still good
    assert connection.getresponse().status == 200
    connection.close()
