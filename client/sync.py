"""Client: AsyncClient for programs without an event loop; runs one in a thread.

    from tokenloom.client import Client

    with Client() as client:
        for delta in client.generate("The capital of France is", max_new_tokens=20):
            print(delta.text, end="", flush=True)
        print(client.complete(messages=[{"role": "user", "content": "And of Spain?"}]).text)

Thread-safe. Leaving a loop early, also by Ctrl-C, aborts its request.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Sequence
from types import TracebackType
from typing import Any, Literal, Self, TypeVar, Unpack

from ..wire.client_messages import Delta, Pong, Usage
from .aio import DEFAULT_PORT, DEFAULT_TIMEOUTS, AsyncClient, AsyncGeneration, Completion, Timeouts
from .errors import ServerGone
from .request import Messages, RequestOptions

T = TypeVar("T")


class _LoopThread:
    """An event loop running in its own thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="tokenloom-client", daemon=True
        )
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` and return its result; cancel it if the wait is interrupted."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Generation:
    """A streamed answer: `for delta in generation`, once. Attributes as in AsyncGeneration."""

    def __init__(self, client: "Client", answer: AsyncGeneration) -> None:
        self._client = client
        self._answer = answer
        self._iterated = False

    def __iter__(self) -> Iterator[Delta]:
        if self._iterated:
            raise RuntimeError("an answer can be iterated over only once")
        self._iterated = True
        try:
            while (delta := self._client._run(self._answer.read())) is not None:
                yield delta
        finally:
            self.close()

    def close(self) -> None:
        """Abort the request unless it has ended."""
        if not self._client.closed:  # closing the client aborts all requests
            self._client._run(self._answer.aclose())

    @property
    def text(self) -> str:
        return self._answer.text

    @property
    def token_ids(self) -> list[int]:
        return self._answer.token_ids

    @property
    def finish_reason(self) -> Literal["stop", "length", "abort"] | None:
        return self._answer.finish_reason

    @property
    def usage(self) -> Usage | None:
        return self._answer.usage

    @property
    def matched_stop(self) -> int | str | None:
        return self._answer.matched_stop


class Client:
    """A blocking AsyncClient, with the same arguments, errors and reconnection."""

    def __init__(
        self,
        address: str | None = None,
        *,
        port: int = DEFAULT_PORT,
        timeout: Timeouts = DEFAULT_TIMEOUTS,
    ) -> None:
        self._client = AsyncClient(address, port=port, timeout=timeout)
        self._thread = _LoopThread()
        self.address = self._client.address
        self.closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Abort requests in flight and disconnect. Idempotent."""
        if self.closed:
            return
        self._thread.call(self._client.aclose())
        self.closed = True
        self._thread.stop()

    def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        input_ids: Sequence[int] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Generation:
        """Stream the answer to a prompt, a chat or token ids: exactly one of the three."""
        answer = self._client.generate(prompt, messages=messages, input_ids=input_ids, **options)
        return Generation(self, answer)

    def complete(
        self,
        prompt: str | None = None,
        *,
        messages: Messages | None = None,
        input_ids: Sequence[int] | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """Return the whole answer at once."""
        return self._run(
            self._client.complete(prompt, messages=messages, input_ids=input_ids, **options)
        )

    def ping(self) -> Pong:
        """Ask for the model's name and readiness."""
        return self._run(self._client.ping())

    def flush_cache(self, timeout_s: float = 0.0) -> int:
        """Flush all cached prefixes; return the number of KV pages freed."""
        return self._run(self._client.flush_cache(timeout_s))

    def load_lora(self, name: str, path: str, *, pinned: bool = False) -> list[str]:
        """Load an adapter as AsyncClient.load_lora does; return the names of all adapters."""
        return self._run(self._client.load_lora(name, path, pinned=pinned))

    def unload_lora(self, name: str) -> list[str]:
        """Unload an adapter; return the remaining names."""
        return self._run(self._client.unload_lora(name))

    def loras(self) -> list[str]:
        """List the names of all adapters that requests can use."""
        return self._run(self._client.loras())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if self.closed:
            work.close()
            raise ServerGone("this client is closed")
        return self._thread.call(work)
