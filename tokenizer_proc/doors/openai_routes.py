"""Handlers of the OpenAI routes: read, submit, deliver. Routing is in `http`."""

import time

from ..front import Front
from ..labels import labels_of
from .asgi import Exchange
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

_STARTED = int(time.time())  # what /v1/models calls `created`


async def chat(front: Front, exchange: Exchange) -> None:
    request = read_chat(await exchange.read_body())
    _check_model(front, request.model)
    rendering = _renderer("chat", front, request)
    labels = labels_of(request, exchange.header(b"authorization"))
    async with exchange.connected():
        with respelled(chat_names(request)):
            prompts = [await front.encode_chat(chat_messages(request.messages))]
            streams = submit_all(front, prompts, [chat_sampling(request)], labels)
        await deliver(exchange, streams, rendering, as_events=bool(request.stream))


async def completions(front: Front, exchange: Exchange) -> None:
    request = read_completion(await exchange.read_body())
    _check_model(front, request.model)
    rendering = _renderer("completion", front, request)
    labels = labels_of(request, exchange.header(b"authorization"))
    async with exchange.connected():
        with respelled(completion_names()):
            prompts = await prompts_of(request.prompt, "prompt", front.encode_texts)
            sampling = [completion_sampling(request)] * len(prompts)
            streams = submit_all(front, prompts, sampling, labels, COMPLETION_MAX_TOKENS)
        await deliver(exchange, streams, rendering, as_events=bool(request.stream))


async def models(front: Front, exchange: Exchange) -> None:
    await exchange.reply(200, ModelList([_card(front)]))


async def model(front: Front, exchange: Exchange) -> None:
    _check_model(front, exchange.scope["path_params"]["model"])
    await exchange.reply(200, _card(front))


def _card(front: Front) -> ModelCard:
    context = None if front.info is None else front.info.context_length
    return ModelCard(front.model_name, _STARTED, front.model_name, context)


def _check_model(front: Front, model: str | None) -> None:
    if model is not None and model != front.model_name:
        raise model_not_found(model)


def _renderer(route: Route, front: Front, request: ChatRequest | CompletionRequest) -> Renderer:
    options = request.stream_options
    if request.rid is not None:
        check_rid(request.rid)
    return Renderer(
        route,
        front.model_name,
        request.rid,
        include_usage=bool(options and options.include_usage),
        every_usage=bool(options and options.continuous_usage_stats),
    )
