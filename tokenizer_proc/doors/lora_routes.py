"""Handlers that load and unload adapters, in SGLang's and vLLM's shapes.

Both take the same bodies; only their success answers differ.
"""

import msgspec

from ..front import Front
from .asgi import Exchange
from .body import BodyReader
from .refused_fields import Refusal


class LoadRequest(msgspec.Struct, frozen=True):
    lora_name: str
    lora_path: str
    pinned: bool | None = None


class UnloadRequest(msgspec.Struct, frozen=True):
    lora_name: str


class LoadedAdapters(msgspec.Struct, frozen=True):
    """SGLang's answer; `loaded_adapters` maps each name to its path below its root."""

    loaded_adapters: dict[str, str]
    success: bool = True
    error_message: str = ""


load_reader = BodyReader(LoadRequest, {"added_tokens_config": Refusal(({},))})
unload_reader = BodyReader(UnloadRequest, {})


async def load(front: Front, exchange: Exchange) -> None:
    await _load(front, exchange)
    await exchange.reply(200, LoadedAdapters(front.adapters.paths()))


async def load_as_vllm(front: Front, exchange: Exchange) -> None:
    name = await _load(front, exchange)
    await exchange.reply_text(f"Success: LoRA adapter '{name}' added successfully.")


async def unload(front: Front, exchange: Exchange) -> None:
    await _unload(front, exchange)
    await exchange.reply(200, LoadedAdapters(front.adapters.paths()))


async def unload_as_vllm(front: Front, exchange: Exchange) -> None:
    name = await _unload(front, exchange)
    await exchange.reply_text(f"Success: LoRA adapter '{name}' removed successfully.")


async def _load(front: Front, exchange: Exchange) -> str:
    request = load_reader.read(await exchange.read_body())
    async with exchange.connected():
        await front.adapters.load(request.lora_name, request.lora_path, pinned=bool(request.pinned))
    return request.lora_name


async def _unload(front: Front, exchange: Exchange) -> str:
    request = unload_reader.read(await exchange.read_body())
    front.adapters.unload(request.lora_name)
    return request.lora_name
