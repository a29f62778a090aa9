"""/generate in SGLang's shape: text or ids, one or a batch, whole or as cumulative events."""

import secrets
import time
from collections.abc import Sequence

import msgspec

from ...wire.messages import Finish, StrOut
from ...wire.sampling import InvalidRequest, SamplingParams
from ..front import Front
from ..labels import labels_of
from .asgi import Exchange, event
from .body import Neutral, decode, parse_fields, refuse_unsupported
from .delivery import deliver
from .intake import prompts_of, submit_all
from .request_ids import check_rid
from .sampling_fields import SamplingFields, respelled, to_sampling
from .tally import Tally

DEFAULT_MAX_NEW_TOKENS = 128


class NativeSampling(SamplingFields, frozen=True, kw_only=True):
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    sampling_seed: int | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    text: str | list[str] | None = None
    input_ids: list[int | list[int]] | None = None
    sampling_params: NativeSampling | list[NativeSampling] | None = None
    stream: bool | None = None
    rid: str | list[str] | None = None
    lora_path: str | list[str | None] | None = None  # names, as in SGLang
    priority: int | None = None
    user: str | None = None
    cache_salt: str | None = None


_UNSUPPORTED: Neutral = {
    "input_embeds": (),
    "image_data": ([],),
    "video_data": ([],),
    "audio_data": ([],),
    "return_logprob": (False,),
    "token_ids_logprob": ([],),
    "top_logprobs_num": (0,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "lora_id": (),
    "session_params": ({},),
    "custom_logit_processor": (),
    "extra_key": (),
    "bootstrap_host": (),
    "bootstrap_room": (),
}

_SAMPLING_UNSUPPORTED: Neutral = {
    "n": (1,),
    "stop_regex": ("", []),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "custom_params": ({},),
}

_decoder = msgspec.json.Decoder(GenerateRequest)


def _read(body: bytes) -> GenerateRequest:
    fields = parse_fields(body)
    refuse_unsupported(fields, _UNSUPPORTED)
    sampling = fields.get("sampling_params")
    for params in sampling if isinstance(sampling, list) else [sampling]:
        if isinstance(params, dict):
            refuse_unsupported(params, _SAMPLING_UNSUPPORTED)
    return decode(body, _decoder)


def _sampling(fields: NativeSampling) -> SamplingParams:
    params = to_sampling(
        fields, max_new_tokens=fields.max_new_tokens, min_new_tokens=fields.min_new_tokens
    )
    if fields.sampling_seed is None:
        return params
    if fields.seed not in (None, fields.sampling_seed):
        raise InvalidRequest("sampling_seed", "sampling_seed and seed contradict each other")
    return msgspec.structs.replace(params, seed=fields.sampling_seed)


def _sampling_of_each(request: GenerateRequest, count: int) -> list[SamplingParams]:
    given = request.sampling_params
    if not isinstance(given, list):
        return [_sampling(given or NativeSampling())] * count
    if len(given) != count:
        raise InvalidRequest(
            "sampling_params", f"sampling_params has {len(given)} entries for {count} prompts"
        )
    return [_sampling(fields) for fields in given]


def _rids(rid: str | list[str] | None, count: int, *, batch: bool) -> list[str]:
    """The name of each prompt in its answer: the client's, `rid_index` in a batch, or a new one."""
    if rid is None:
        return [secrets.token_hex(16) for _ in range(count)]
    if isinstance(rid, str):
        names = [f"{rid}_{index}" for index in range(count)] if batch else [rid]
        given = [rid]
    else:
        names = given = rid
    if len(names) != count:
        raise InvalidRequest("rid", f"rid has {len(names)} entries for {count} prompts")
    for name in given:
        check_rid(name)
    return names


def _adapters(given: str | list[str | None] | None, count: int) -> list[str | None]:
    """The adapter of each prompt; None: the base model."""
    if not isinstance(given, list):
        return [given] * count
    if len(given) != count:
        raise InvalidRequest("lora_path", f"lora_path has {len(given)} entries for {count} prompts")
    return given


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True):
    type: str
    matched: int | str | None = None
    length: int | None = None
    message: str | None = None


class MetaInfo(msgspec.Struct, frozen=True):
    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float  # seconds


class Generated(msgspec.Struct, frozen=True):
    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | msgspec.UnsetType = msgspec.UNSET  # only in the events of a batch


class NativeRenderer:
    """Every event repeats all text and ids so far, as SGLang's does."""

    def __init__(self, rids: list[str], *, batch: bool) -> None:
        self._rids = rids
        self._batch = batch
        self._begun = time.monotonic()

    def whole(self, tallies: Sequence[Tally]) -> msgspec.Struct | Sequence[msgspec.Struct]:
        answers = [self._so_far(index, tally) for index, tally in enumerate(tallies)]
        return answers if self._batch else answers[0]

    def frames(self, index: int, tally: Tally, row: StrOut) -> bytes:
        answer = self._so_far(index, tally)
        return event(msgspec.structs.replace(answer, index=index) if self._batch else answer)

    def last_frames(self, tallies: Sequence[Tally]) -> bytes:
        return b""

    def _so_far(self, index: int, tally: Tally) -> Generated:
        meta = MetaInfo(
            id=self._rids[index],
            finish_reason=_finish_reason(tally.finish, tally.completion_tokens),
            prompt_tokens=tally.prompt_tokens,
            completion_tokens=tally.completion_tokens,
            cached_tokens=tally.cached_tokens,
            e2e_latency=time.monotonic() - self._begun,
        )
        return Generated(tally.text, tally.token_ids, meta)


def _finish_reason(finish: Finish | None, completion_tokens: int) -> FinishReason | None:
    match finish:
        case None:
            return None
        case Finish(reason="stop"):
            return FinishReason("stop", matched=finish.matched)
        case Finish(reason="length"):
            return FinishReason("length", length=completion_tokens)
        case _:
            return FinishReason(finish.reason, message=finish.message)


async def generate(front: Front, exchange: Exchange) -> None:
    request = _read(await exchange.read_body())
    if (request.text is None) == (request.input_ids is None):
        raise InvalidRequest("text", "exactly one of text and input_ids must be given")
    name = "input_ids" if request.text is None else "text"
    prompt = request.input_ids if request.text is None else request.text
    batch = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
    labels = labels_of(request, exchange.header(b"authorization"))
    async with exchange.connected():
        with respelled({"input_ids": name, "prompt": name}):
            prompts = await prompts_of([] if prompt is None else prompt, name, front.encode_texts)
            rids = _rids(request.rid, len(prompts), batch=batch)
            sampling = _sampling_of_each(request, len(prompts))
            adapters = _adapters(request.lora_path, len(prompts))
            streams = await submit_all(
                front, prompts, sampling, adapters, labels, DEFAULT_MAX_NEW_TOKENS
            )
        rendering = NativeRenderer(rids, batch=batch)
        await deliver(exchange, streams, rendering, as_events=bool(request.stream))
