"""A fake server of /v1/completions without a model; the model name selects its behaviour.

Runs in a thread for tests (`FakeOpenAI`), or as a program that takes a peer's command line and
reads --port alone. Written from the protocol, not from our client, with plain asyncio streams.
"""

import argparse
import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

CACHED = 3  # cached prompt tokens in every answer
BEHAVIOURS = (
    "fine",
    "bytewise",  # every byte in a write of its own
    "silent",  # without usage
    "short",  # half as many tokens as asked for
    "refuses",  # 503
    "cuts",  # closes the connection after the first token
    "ends-early",  # a whole HTTP message without [DONE] and usage
    "fails",  # an error frame after the first token
    "garbles",  # no JSON
    "hangs",  # nothing after the first token
    "closes",  # answers with keep-alive, then closes
)


@dataclass
class FakeOpenAI:
    """`asked` holds the request bodies in order of arrival, `most` the highest concurrency."""

    models: tuple[str, ...] = BEHAVIOURS
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    connections: int = 0
    most: int = 0
    port: int = 0
    step: Callable[[], Coroutine[Any, Any, None]] = lambda: asyncio.sleep(0)  # before each token
    _now: int = 0

    def __enter__(self) -> Self:
        ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self.serve(ready.set)))
        self._thread.start()
        assert ready.wait(10)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, on_ready: Callable[[], object]) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        tasks: set[asyncio.Task[None]] = set()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self.connections += 1
            tasks.add(asyncio.create_task(self._connection(reader, writer)))

        server = await asyncio.start_server(connected, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        on_ready()
        await self._over.wait()
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._exchange(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the client left
        finally:
            writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Serve one request; return whether the connection may be reused."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        request_line, *lines = head.strip().split("\r\n")
        headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        method, path, _ = request_line.split()
        if (method, path) == ("GET", "/health"):
            self._whole(writer, 200, {})
        elif (method, path) == ("GET", "/v1/models"):
            self._whole(writer, 200, {"data": [{"id": name} for name in self.models]})
        else:
            assert (method, path) == ("POST", "/v1/completions")
            self.headers.append(headers)
            self.asked.append(json.loads(body))
            self._now += 1
            self.most = max(self.most, self._now)
            try:
                return await self._complete(writer, self.asked[-1])
            finally:
                self._now -= 1
        return True

    async def _complete(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> bool:
        behaviour = body["model"]
        if behaviour == "refuses":
            self._whole(writer, 503, {"error": {"message": "too busy"}})
            return True
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        tokens = body["max_tokens"] // (2 if behaviour == "short" else 1)
        for index in range(tokens):
            await self.step()
            await self._event(writer, {"choices": [{"text": f" w{index}"}], "usage": None})
            if behaviour == "cuts":
                return False
            if behaviour == "hangs":
                await asyncio.Event().wait()
            if behaviour == "garbles":
                await self._chunk(writer, b"data: {not json\n\n")
            if behaviour == "fails":
                await self._event(writer, {"error": {"message": "broke"}})
        if behaviour not in ("silent", "ends-early"):
            await self._event(writer, {"choices": [], "usage": _usage(body, tokens)})
        if behaviour != "ends-early":
            await self._chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return behaviour != "closes"

    async def _event(self, writer: asyncio.StreamWriter, value: dict[str, Any]) -> None:
        payload = b"data: " + json.dumps(value).encode() + b"\n\n"
        bytewise = self.asked[-1]["model"] == "bytewise"
        for piece in [bytes([byte]) for byte in payload] if bytewise else [payload]:
            await self._chunk(writer, piece)

    async def _chunk(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await writer.drain()

    def _whole(self, writer: asyncio.StreamWriter, status: int, value: object) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)


def _usage(body: dict[str, Any], tokens: int) -> dict[str, Any]:
    prompt = body["prompt"]
    count = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
    details = {"cached_tokens": CACHED}
    return {
        "prompt_tokens": count,
        "completion_tokens": tokens,
        "prompt_tokens_details": details,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    known, _ = parser.parse_known_args()
    asyncio.run(FakeOpenAI(port=known.port).serve(lambda: None))
