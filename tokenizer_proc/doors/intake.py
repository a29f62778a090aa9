"""Encoding and submission of prompts, shared by all generation routes.

Called by the handlers of the OpenAI and native routes; raises what `Front` raises, or
InvalidRequest under the field name it was given.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from ...wire.sampling import InvalidRequest, SamplingParams
from ..front import Front, RequestStream
from ..labels import Labels
from ..limits import MAX_PROMPTS
from .body import Prompt, too_many_prompts

IDS_WITHOUT_PAUSE = 1 << 15  # submitted before yielding to the loop; they take about 2 ms


async def prompts_of(
    prompt: Prompt, name: str, encode_texts: Callable[[list[str]], Awaitable[list[list[int]]]]
) -> list[list[int]]:
    """Return token ids of each prompt. All prompts have one type, as `read_prompt` ensures."""
    if isinstance(prompt, str):
        return await encode_texts([prompt])
    if not prompt:
        raise InvalidRequest(name, f"{name} is an empty list")
    if isinstance(prompt[0], int):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise too_many_prompts(len(prompt), name)
    if isinstance(prompt[0], str):
        return await encode_texts(prompt)
    return prompt


async def submit_all(
    front: Front,
    prompts: list[list[int]],
    sampling: Sequence[SamplingParams],
    adapters: Sequence[str | None],
    labels: Labels,
    default_max_new_tokens: int | None = None,
) -> list[RequestStream]:
    """Submit one stream per prompt, or none: if one is refused, those before it are aborted.

    Waits for evicted adapters to be loaded. `default_max_new_tokens` applies where a client set no
    limit, and is cut to the room in the context.
    """
    streams: list[RequestStream] = []
    since_pause = 0
    async with front.adapters.using(adapters) as lora_ids:
        try:
            for input_ids, params, lora_id in zip(prompts, sampling, lora_ids, strict=True):
                if params.max_new_tokens is None and default_max_new_tokens is not None:
                    room = max(1, front.room(len(input_ids)))
                    params = msgspec.structs.replace(
                        params, max_new_tokens=min(default_max_new_tokens, room)
                    )
                streams.append(front.submit(input_ids, params, labels, lora_id))
                since_pause += len(input_ids)
                if since_pause > IDS_WITHOUT_PAUSE:
                    since_pause = 0
                    await asyncio.sleep(0)
        except BaseException:
            close_all(streams)
            raise
    return streams


def close_all(streams: list[RequestStream]) -> None:
    for stream in streams:
        stream.close()
