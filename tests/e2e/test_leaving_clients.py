"""Clients that disconnect midway: their requests end and their pages are freed at once."""

import asyncio
import json
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

import pytest
from support.server import PATIENCE_S, Server, wait_for

from tokenloom.client import AsyncClient, Client, ServerGone

pytestmark = pytest.mark.slow

PROMPT = [5 + i % 900 for i in range(200)]
LONG = {"max_new_tokens": 3000, "ignore_eos": True}


def by_event_stream(server: Server) -> Callable[[], None]:
    stream = server.stream(PROMPT, **LONG)
    stream.event()
    return stream.leave


def by_reset(server: Server) -> Callable[[], None]:
    """Reset the connection."""
    connection = _post(server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 3000})
    return lambda: _reset(connection)


def by_half_closed_wait(server: Server) -> Callable[[], None]:
    """Close the connection while waiting for a whole answer."""
    connection = _post(server, "/v1/completions", {"prompt": PROMPT, "max_tokens": 3000})
    return connection.close


def by_socket_abort(server: Server) -> Callable[[], None]:
    client = Client(server.door)
    answer = client.generate(input_ids=PROMPT, **LONG)  # type: ignore[arg-type]
    deltas = iter(answer)  # keep the iterator: dropping it would abort the request
    next(deltas)

    def leave() -> None:
        answer.close()
        assert not list(deltas)
        client.close()

    return leave


def by_socket_close(server: Server) -> Callable[[], None]:
    """Close the socket without sending Abort."""
    client = Client(server.door)
    deltas = iter(client.generate(input_ids=PROMPT, **LONG))  # type: ignore[arg-type]
    next(deltas)

    def leave() -> None:
        client.close()
        with pytest.raises(ServerGone):
            list(deltas)

    return leave


def _post(server: Server, route: str, body: dict[str, object]) -> socket.socket:
    content = json.dumps({**body, "ignore_eos": True}).encode()
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
    head = f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def _reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


WAYS = [by_event_stream, by_reset, by_half_closed_wait, by_socket_abort, by_socket_close]


@pytest.mark.parametrize("come", WAYS, ids=lambda way: way.__name__)
def test_pages_are_free_within_two_steps(
    server: Server, come: Callable[[Server], Callable[[], None]]
) -> None:
    """After the client has left, the scheduler makes at most two more steps.

    The first count is read before the disconnect, and a busy machine may delay the abort, so the
    best of a few tries counts.
    """
    needed = []
    for _ in range(4):
        leave = come(server)
        before = wait_for(lambda: (stats := server.stats())["running"] and stats)
        assert before["used_tokens"] >= len(PROMPT)
        leave()
        after = server.wait_until_idle()
        needed.append(after["step"] - before["step"])
        if needed[-1] <= 2:
            return
    pytest.fail(f"steps until all was free: {needed}")


def test_leaving_while_the_prompt_is_computed(server: Server) -> None:
    """Pages of a partly computed prompt and the place in the queue are freed too."""
    prompt = [5 + i % 7001 for i in range(6000)]
    connections = [_post(server, "/v1/completions", {"prompt": prompt[i:]}) for i in range(3)]
    wait_for(lambda: server.stats()["used_tokens"] >= 512)
    for connection in connections:
        connection.close()
    before = server.stats()
    after = server.wait_until_idle()
    assert after["step"] - before["step"] < 6, "twelve steps would be one whole prompt"


def test_a_crowd_that_leaves(server: Server) -> None:
    """ABT-06."""

    async def scenario() -> None:
        async with AsyncClient(server.door) as client:

            async def one(index: int) -> None:
                answer = client.generate(input_ids=PROMPT[index:], **LONG)  # type: ignore[arg-type]
                async for _ in answer:
                    if len(answer.token_ids) > index % 5:
                        break

            running = [asyncio.create_task(one(index)) for index in range(20)]
            with suppress(TimeoutError):
                async with asyncio.timeout(PATIENCE_S):
                    await asyncio.gather(*running[:10])
            for task in running[10:]:
                task.cancel()
            await asyncio.gather(*running[10:], return_exceptions=True)

    asyncio.run(scenario())
    server.wait_until_idle()
    assert server.generate(PROMPT, max_new_tokens=2)["output_ids"]
