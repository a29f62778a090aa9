"""Handlers of the OpenAI routes: read, submit, deliver. Routing is in `http`."""

import time

from ..errors import NoSuchAdapter
from ..front import Front
from ..labels import labels_of
from .asgi import Exchange
from .body import read_prompt
from .delivery import deliver
from .errors import model_not_found
from .intake import prompts_of, submit_all
from .openai_answers import Renderer, Route
from .openai_requests import (
    COMPLETION_MAX_TOKENS,
    chat_messages,
    chat_names,
    chat_sampling,
    completion_names,
    completion_sampling,
    read_chat,
    read_completion,
)
from .openai_wire import ChatRequest, CompletionRequest, ModelCard, ModelList
from .request_ids import check_rid
from .sampling_fields import respelled

_STARTED = int(time.time())  # `created` in /v1/models


async def chat(front: Front, exchange: Exchange) -> None:
    request = read_chat(await exchange.read_body())
    adapter = _adapter(front, request.model)
    rendering = _renderer("chat", front, request)
    labels = labels_of(request, exchange.header(b"authorization"))
    as_events = bool(request.stream)
    async with exchange.connected():
        with respelled(chat_names(request)):
            sampling = [chat_sampling(request)]
            prompts = [await front.encode_chat(chat_messages(request.messages))]
            streams = await submit_all(front, prompts, sampling, [adapter], labels)
        del request, prompts  # do not keep the body while the answer is generated
        await deliver(exchange, streams, rendering, as_events=as_events)


async def completions(front: Front, exchange: Exchange) -> None:
    request = read_completion(await exchange.read_body())
    adapter = _adapter(front, request.model)
    rendering = _renderer("completion", front, request)
    labels = labels_of(request, exchange.header(b"authorization"))
    as_events = bool(request.stream)
    async with exchange.connected():
        with respelled(completion_names()):
            params = completion_sampling(request)
            prompt = read_prompt(request.prompt, "prompt", front.context_length())
            prompts = await prompts_of(prompt, "prompt", front.encode_texts)
            sampling = [params] * len(prompts)
            adapters = [adapter] * len(prompts)
            streams = await submit_all(
                front, prompts, sampling, adapters, labels, COMPLETION_MAX_TOKENS
            )
        del request, prompt, prompts
        await deliver(exchange, streams, rendering, as_events=as_events)


async def models(front: Front, exchange: Exchange) -> None:
    adapters = front.adapters.registry.names()
    await exchange.reply(200, ModelList([_card(front, name) for name in (None, *adapters)]))


async def model(front: Front, exchange: Exchange) -> None:
    adapter = _adapter(front, exchange.scope["path_params"]["model"])
    await exchange.reply(200, _card(front, adapter))


def _card(front: Front, adapter: str | None) -> ModelCard:
    base = front.model_name
    context = None if front.info is None else front.info.context_length
    if adapter is None:
        return ModelCard(base, _STARTED, base, context)
    return ModelCard(adapter, _STARTED, base, context, parent=base)


def _adapter(front: Front, model: str | None) -> str | None:
    """Return the adapter that `model` names; None: the base model."""
    try:
        return front.adapters.named(model)
    except NoSuchAdapter as error:
        raise model_not_found(error.name, [front.model_name, *error.there]) from None


def _renderer(route: Route, front: Front, request: ChatRequest | CompletionRequest) -> Renderer:
    options = request.stream_options
    if request.rid is not None:
        check_rid(request.rid)
    return Renderer(
        route,
        request.model or front.model_name,
        request.rid,
        include_usage=bool(options and options.include_usage),
        every_usage=bool(options and options.continuous_usage_stats),
    )
