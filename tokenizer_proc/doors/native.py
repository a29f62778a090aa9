"""/generate in SGLang's shape: text or ids, one or a batch, whole or as cumulative events."""

import secrets
import time
from collections.abc import Sequence

import msgspec

from ...wire.messages import Finish, StrOut
from ...wire.sampling import InvalidRequest, SamplingParams
from ..front import Front, RequestStream
from ..labels import Labels, labels_of
from ..limits import MAX_PROMPTS, MAX_SAMPLING_BYTES
from ..whole_numbers import Number, whole
from .asgi import Exchange, event
from .body import BodyReader, Prompt, decode, is_set, read_ids, too_many_prompts
from .delivery import deliver
from .intake import prompts_of, submit_all
from .refused_fields import NATIVE_ELSEWHERE, refusals
from .request_ids import check_rid
from .sampling_fields import SamplingFields, respelled, to_sampling
from .tally import Tally

DEFAULT_MAX_NEW_TOKENS = 128


class NativeSampling(SamplingFields, frozen=True, kw_only=True):
    max_new_tokens: Number | None = None
    min_new_tokens: Number | None = None
    sampling_seed: Number | None = None


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    text: str | list[str] | None = None
    input_ids: msgspec.Raw = msgspec.Raw()  # see body.read_ids
    sampling_params: msgspec.Raw = msgspec.Raw()  # see read_sampling
    stream: bool | None = None
    rid: str | list[str] | None = None
    lora_path: str | list[str | None] | None = None  # names, as in SGLang
    model: str | None = None  # gateways add it; the base model or an adapter
    priority: Number | None = None
    user: str | None = None
    cache_salt: str | None = None


_SAMPLING = NativeSampling.__struct_fields__
_BESIDE = GenerateRequest.__struct_fields__

_INTO_SAMPLING = {name: f"sampling_params.{name}" for name in _SAMPLING}
_OUT_OF_SAMPLING = {name: f"{name} beside sampling_params" for name in _BESIDE}

generate_reader = BodyReader(
    GenerateRequest, refusals(_BESIDE, {**_INTO_SAMPLING, **NATIVE_ELSEWHERE})
)
sampling_reader = BodyReader(
    NativeSampling, refusals(_SAMPLING, {**_OUT_OF_SAMPLING, **NATIVE_ELSEWHERE})
)
_list_of_raw = msgspec.json.Decoder(list[msgspec.Raw])


def read_sampling(raw: msgspec.Raw, count: int) -> list[NativeSampling]:
    """Decode the sampling of `count` prompts: one object for all, or a list with one each."""
    name = "sampling_params"
    if not is_set(raw):
        return [NativeSampling()] * count
    if len(bytes(raw)) > MAX_SAMPLING_BYTES:
        raise InvalidRequest(
            name, f"{name} has {len(bytes(raw))} bytes; at most {MAX_SAMPLING_BYTES} are allowed"
        )
    if bytes(raw)[:1] != b"[":
        return [sampling_reader.read(raw, name)] * count
    given = decode(raw, _list_of_raw, name)
    if len(given) != count:
        raise InvalidRequest(name, f"{name} has {len(given)} entries for {count} prompts")
    return [sampling_reader.read(one, name) for one in given]


def _sampling(fields: NativeSampling) -> SamplingParams:
    params = to_sampling(
        fields, max_new_tokens=fields.max_new_tokens, min_new_tokens=fields.min_new_tokens
    )
    if fields.sampling_seed is None:
        return params
    if fields.seed not in (None, fields.sampling_seed):
        raise InvalidRequest("sampling_seed", "sampling_seed and seed contradict each other")
    return msgspec.structs.replace(params, seed=whole(fields.sampling_seed, "sampling_seed"))


def _rids(rid: str | list[str] | None, count: int, *, batch: bool) -> list[str]:
    """Return the id of each prompt: the client's, `rid_index` in a batch, or a new one."""
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


def _adapters(front: Front, request: GenerateRequest, count: int) -> list[str | None]:
    """Return the adapter of each prompt; None: the base model."""
    given = request.lora_path
    if request.model is not None:
        named = front.adapters.named(request.model)
        if named is not None and given not in (None, named):
            raise InvalidRequest("model", "model and lora_path name different adapters")
        given = named if given is None else given
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
    """Renderer in SGLang's form: every event repeats all text and ids so far."""

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
    request = generate_reader.read(await exchange.read_body())
    labels = labels_of(request, exchange.header(b"authorization"))
    as_events = bool(request.stream)
    async with exchange.connected():
        streams, rendering = await _start(front, request, labels)
        del request  # do not keep the body while the answer is generated
        await deliver(exchange, streams, rendering, as_events=as_events)


async def _start(
    front: Front, request: GenerateRequest, labels: Labels
) -> tuple[list[RequestStream], NativeRenderer]:
    name, prompt = prompt_of(request, front.context_length())
    batch = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
    sampling = read_sampling(request.sampling_params, len(prompt) if batch else 1)
    params = [_sampling(fields) for fields in sampling]
    with respelled({"input_ids": name, "prompt": name}):
        rids = _rids(request.rid, len(params), batch=batch)
        adapters = _adapters(front, request, len(params))
        prompts = await prompts_of(prompt, name, front.encode_texts)
        streams = await submit_all(front, prompts, params, adapters, labels, DEFAULT_MAX_NEW_TOKENS)
    return streams, NativeRenderer(rids, batch=batch)


def prompt_of(request: GenerateRequest, most_ids: int) -> tuple[str, Prompt]:
    """Return the name and value of the field that has the prompt."""
    ids_given = is_set(request.input_ids)
    if (request.text is None) != ids_given:
        raise InvalidRequest("text", "exactly one of text and input_ids must be given")
    if request.text is not None:
        if isinstance(request.text, list) and len(request.text) > MAX_PROMPTS:
            raise too_many_prompts(len(request.text), "text")
        return "text", request.text
    return "input_ids", read_ids(request.input_ids, "input_ids", most_ids)
