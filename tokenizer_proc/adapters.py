"""Adapters: load and unload LoRA adapters for clients, and hold them for requests.

Owned by the Front, called by all doors. The registry decides; this object sends its messages to the
scheduler, waits for the answers with timeouts, and checks names and paths from clients.
"""

import asyncio
import logging
import os
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from ..wire.lora_config import LORA_NAME, LoRAConfig, read_lora
from ..wire.messages import (
    Finish,
    LoadLoRAReq,
    LoRALoaded,
    LoRARef,
    LoRAUnloaded,
    UnloadLoRAReq,
)
from ..wire.sampling import InvalidRequest
from .errors import NoSuchAdapter, Refused, quoted
from .limits import LORA_LOAD_SECONDS, MAX_PATH_CHARS
from .lora_registry import BASE, LoadState, LoRARegistry, Words

log = logging.getLogger(__name__)


class AdapterError(ValueError):
    """An adapter of --lora cannot be served; the message says which and why."""


class Adapters:
    def __init__(
        self,
        config: LoRAConfig,
        model_name: str,
        send: Callable[[LoadLoRAReq | UnloadLoRAReq], None],
        max_waiting: int,
        require_ready: Callable[[], object],
    ) -> None:
        """`require_ready` raises Refused while clients cannot be served."""
        self.complete = not config.lora  # every adapter of --lora is loaded
        self.registry = LoRARegistry(config.max_loaded_loras)
        self._model_name = model_name
        self._send = send
        self._require_ready = require_ready
        self._first = [read_lora(flag) for flag in config.lora]
        self._roots = [_absolute(root) for root in config.lora_root]
        self._own = [_absolute(path) for _, path, _ in self._first]
        self._coming: dict[int, asyncio.Future[LoRALoaded]] = {}
        self._max_waiting = max_waiting
        self._waiting = 0

    async def load_first(self) -> None:
        """Load the adapters of --lora in order. Raises AdapterError."""
        for (name, _, pinned), path in zip(self._first, self._own, strict=True):
            try:
                self._check_name(name)
                ref, words = self.registry.load(name, path, pinned=pinned)
                self._tell(words)
                await self._ready(ref, None)
            except (InvalidRequest, Refused) as error:
                raise AdapterError(f"--lora {name}={path}: {error.message}") from error
        self.complete = True

    async def load(self, name: str, path: str, *, pinned: bool) -> None:
        """Load an adapter; return when requests for `name` get it.

        Raises InvalidRequest or Refused, and `name` then keeps its meaning. If the caller is
        cancelled, the load goes on.
        """
        self._require_ready()
        self._check_name(name)
        real = await asyncio.to_thread(_find, path, self._roots, self._own)
        ref, words = self.registry.load(name, real, pinned=pinned)
        self._tell(words)
        await self._ready(ref, LORA_LOAD_SECONDS)

    def unload(self, name: str) -> None:
        """Remove the name at once; its running requests finish on the weights they started with."""
        self._require_ready()
        self._tell(self.registry.unload(name))
        log.info("adapter %s is unloaded", name)

    def named(self, model: str | None) -> str | None:
        """Return the adapter that OpenAI's `model` field names; None: the base model.

        `adapter` and `base:adapter` are equivalent. Raises NoSuchAdapter.
        """
        if model is None or model == self._model_name:
            return None
        name = model.removeprefix(f"{self._model_name}:")
        if name not in self.registry:
            self._require_ready()
            raise NoSuchAdapter(model, self.registry.names())
        return name

    @asynccontextmanager
    async def using(self, names: Sequence[str | None]) -> AsyncIterator[list[int]]:
        """Yield the lora_ids to submit with inside this block; None names the base model.

        Waits until all are loaded. Raises NoSuchAdapter, or Refused when there is no room.
        """
        self._require_ready()
        for name in names:
            if name is not None:
                self.registry.require(name)
        held: list[int] = []
        try:
            for name in names:
                held.append(BASE if name is None else await self._hold(name))
            yield held
        finally:
            for lora_id in held:
                if lora_id != BASE:
                    self._tell(self.registry.unhold(lora_id))

    def take(self, answer: LoRALoaded | LoRAUnloaded) -> bool:
        """Process an answer of the scheduler; return False for one that was not asked for."""
        state = self.registry.state(answer.lora_id)
        if isinstance(answer, LoRAUnloaded):
            if state is not LoadState.DRAINING:
                return False
            self.registry.unloaded(answer.lora_id)
            return True
        if state is not LoadState.LOADING:
            return False
        ref = self.registry.ref(answer.lora_id)
        if answer.ok:
            log.info("adapter %s is load %d, rank %d", ref.name, ref.lora_id, answer.rank)
        else:
            log.warning("adapter %s cannot be loaded: %s", ref.name, answer.message)
        self._tell(self.registry.loaded(answer))
        self._answer(answer)
        return True

    def end_all(self, finish: Finish) -> None:
        """Fail all pending loads with `finish`: the scheduler has ended."""
        for lora_id in list(self._coming):
            self._answer(LoRALoaded(lora_id, False, finish.message, finish.status))

    async def _hold(self, name: str) -> int:
        ref, words = self.registry.hold(name)
        try:
            self._tell(words)
            if ref.lora_id in self._coming:
                await self._ready_again(ref)
        except BaseException:
            self._tell(self.registry.unhold(ref.lora_id))
            raise
        return ref.lora_id

    async def _ready_again(self, ref: LoRARef) -> None:
        if self._waiting >= self._max_waiting:
            raise Refused(503, f"{self._waiting} requests wait for adapters to be loaded")
        self._waiting += 1
        try:
            await self._ready(ref, LORA_LOAD_SECONDS)
        except Refused as refused:  # not the request's fault, hence 503
            text = f"the adapter {ref.name!r} could not be loaded again: {refused.message}"
            raise Refused(503, text) from refused
        finally:
            self._waiting -= 1

    async def _ready(self, ref: LoRARef, seconds: float | None) -> None:
        """Wait for the scheduler's answer to a load. Raises Refused."""
        try:
            async with asyncio.timeout(seconds):
                answer = await asyncio.shield(self._coming[ref.lora_id])
        except TimeoutError:
            text = f"the adapter {ref.name!r} is still being loaded after {seconds:g} s"
            raise Refused(503, text) from None
        if not answer.ok:
            status = answer.status if 400 <= answer.status <= 599 else 500
            raise Refused(status, answer.message.replace(ref.path, self.shown(ref.path)))

    def paths(self) -> dict[str, str]:
        """Return the path of each adapter in the form that clients may see."""
        return {name: self.shown(path) for name, path in self.registry.paths().items()}

    def shown(self, path: str) -> str:
        """Return `path` relative to its --lora-root; for an adapter of --lora, its last part."""
        for root in self._roots:
            if os.path.commonpath([path, root]) == root:
                return os.path.relpath(path, root)
        return os.path.basename(path)

    def _tell(self, words: Words) -> None:
        for word in words:
            if isinstance(word, LoadLoRAReq):
                loop = asyncio.get_running_loop()
                self._coming[word.ref.lora_id] = loop.create_future()
            self._send(word)

    def _answer(self, answer: LoRALoaded) -> None:
        """Resolve the pending load, if there is one."""
        coming = self._coming.pop(answer.lora_id, None)
        if coming is not None:  # else `end_all` has answered already
            coming.set_result(answer)

    def _check_name(self, name: str) -> None:
        if not re.fullmatch(LORA_NAME, name):
            raise InvalidRequest(
                "lora_name", "lora_name must be 1 to 128 letters, digits or . _ - (no sign first)"
            )
        if name == self._model_name:
            raise InvalidRequest("lora_name", f"{name} is the name of the base model")


def _absolute(path: str) -> str:
    """Resolve a path from a flag, ~ included: a shell does not expand it in NAME=~/x."""
    return os.path.realpath(os.path.expanduser(path))


def _find(path: str, roots: list[str], own: list[str]) -> str:
    """Resolve a client's path, absolute or below a root, and check where it lies.

    A path outside is refused with the same error whether it exists or not.
    """
    if not path or "\0" in path or len(path) > MAX_PATH_CHARS:
        raise InvalidRequest(
            "lora_path", f"lora_path must have 1 to {MAX_PATH_CHARS} characters, no NUL"
        )
    places = [path] if os.path.isabs(path) else [os.path.join(root, path) for root in roots]
    allowed = [real for real in map(os.path.realpath, places) if _inside(real, roots, own)]
    if not allowed:
        raise InvalidRequest(
            "lora_path",
            "lora_path must lie below a directory that the server was started with (--lora-root)",
        )
    there = [real for real in allowed if os.path.isdir(real)]
    if not there:
        raise Refused(404, f"there is no directory {quoted(path)}")
    return there[0]


def _inside(real: str, roots: list[str], own: list[str]) -> bool:
    return real in own or any(os.path.commonpath([real, root]) == root for root in roots)
