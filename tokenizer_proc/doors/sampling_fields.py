"""Sampling fields that all three generation routes share, and their translation.

JSON null means unset for every field, and a whole number may be written as 4.0. Most bounds are
checked in `wire.sampling`, by `Front.submit`; `respelled` maps its errors to the client's field
names.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from ...wire.limits import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from ...wire.sampling import InvalidRequest, SamplingParams
from ..whole_numbers import Number, whole
from .body import decode, is_set

_bias = msgspec.json.Decoder(dict[int, float])


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    temperature: float | None = None
    top_p: float | None = None
    top_k: Number | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: msgspec.Raw = msgspec.Raw()
    seed: Number | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Number] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None


_SAME_NAME = tuple(
    name
    for name in SamplingFields.__struct_fields__
    if name not in ("stop", "stop_token_ids", "logit_bias", "top_k", "seed")
)


def to_sampling(
    fields: SamplingFields, *, max_new_tokens: Number | None, min_new_tokens: Number | None
) -> SamplingParams:
    """Convert the fields that are set; the others keep SamplingParams' defaults."""
    given: dict[str, Any] = {
        name: value for name in _SAME_NAME if (value := getattr(fields, name)) is not None
    }
    if fields.top_k is not None:
        given["top_k"] = whole(fields.top_k, "top_k")
    stop = (fields.stop,) if isinstance(fields.stop, str) else tuple(fields.stop or ())
    return SamplingParams(
        max_new_tokens=whole(max_new_tokens, "max_new_tokens"),
        min_new_tokens=whole(min_new_tokens, "min_new_tokens") or 0,
        stop=stop,
        stop_token_ids=_stop_token_ids(fields.stop_token_ids or []),
        logit_bias=_logit_bias(fields.logit_bias),
        seed=whole(fields.seed, "seed"),
        **given,
    )


def _stop_token_ids(given: list[Number]) -> tuple[int, ...]:
    if len(given) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            "stop_token_ids",
            f"stop_token_ids has {len(given)} entries; at most {MAX_STOP_TOKEN_IDS} are allowed",
        )
    return tuple(whole(token_id, "stop_token_ids") for token_id in given)


def _logit_bias(raw: msgspec.Raw) -> dict[int, float] | None:
    """Decode logit_bias after counting its entries by their colons."""
    if not is_set(raw):
        return None
    count = bytes(raw).count(b":")
    if count > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            "logit_bias", f"logit_bias has {count} entries; at most {MAX_LOGIT_BIAS} are allowed"
        )
    return decode(raw, _bias, "logit_bias") or None


@contextmanager
def respelled(names: Mapping[str, str]) -> Iterator[None]:
    """Rename our field names in errors that leave the block to the client's names."""
    try:
        yield
    except InvalidRequest as error:
        message = error.message
        for ours, theirs in names.items():
            # A field name that is a plain word is replaced only as the subject of the message.
            if "_" in ours or message.startswith(f"{ours} "):
                message = message.replace(ours, theirs, -1 if "_" in ours else 1)
        param = names.get(error.param, error.param)
        raise InvalidRequest(param, message, error.code) from None
