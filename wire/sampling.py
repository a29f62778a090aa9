"""SamplingParams: how one request's tokens are sampled, and the bounds of every field.

Clients send it, front and scheduler check it, the sampler applies it. PURE: msgspec only. Every
field has an effect; what the sampler does not support has no field here.
"""

import math
from typing import Annotated

import msgspec
from msgspec import Meta

from .limits import MAX_LOGIT_BIAS, MAX_STOP_CHARS, MAX_STOP_STRINGS, MAX_STOP_TOKEN_IDS

GREEDY_BELOW = 1e-5  # a smaller temperature means greedy: dividing by it would overflow float32
_INT64 = 1 << 63
_INT32_MAX = (1 << 31) - 1


class InvalidRequest(ValueError):
    """A request that breaks a bound: `param` names the field, the message names the limit.

    `code` is machine-readable, such as "context_length_exceeded".
    """

    def __init__(self, param: str, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.message = message
        self.code = code


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Sampling settings with SGLang's names; None or -1 `max_new_tokens` means all that fits."""

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # -1 and 0: off
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Annotated[dict[int, float], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    seed: int | None = None  # -1: random, as None
    stop: Annotated[tuple[str, ...], Meta(max_length=MAX_STOP_STRINGS)] = ()
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=MAX_STOP_TOKEN_IDS)] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False  # keep the matched stop string or token in the text

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW or self.top_k == 1

    @property
    def penalised(self) -> bool:
        return bool(
            self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0
        )


# field -> (lowest, highest); both ends allowed
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_k": (-1, _INT32_MAX),
    "min_p": (0.0, 1.0),
    "frequency_penalty": (-2.0, 2.0),
    "presence_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 10.0),
}


def check_sampling(params: SamplingParams, vocab_size: int) -> None:
    """Raise InvalidRequest for the first field out of bounds. Front and scheduler call it."""
    for field, (low, high) in _RANGES.items():
        value = getattr(params, field)
        if not low <= value <= high:  # NaN fails every comparison
            raise InvalidRequest(
                field, f"{field} must be between {low:.10g} and {high:.10g}, got {value}"
            )
    if not 0.0 < params.top_p <= 1.0:
        raise InvalidRequest("top_p", f"top_p must be above 0 and at most 1, got {params.top_p}")
    _check_lengths(params)
    _check_token_ids(params, vocab_size)
    _check_stop(params.stop)
    if params.seed is not None and not -_INT64 <= params.seed < _INT64:
        raise InvalidRequest("seed", f"seed must fit 64 signed bits, got {params.seed}")


def _check_lengths(params: SamplingParams) -> None:
    longest = params.max_new_tokens
    if longest is not None and not 1 <= longest <= _INT32_MAX:
        raise InvalidRequest(
            "max_new_tokens",
            f"max_new_tokens must be at least 1 and at most {_INT32_MAX}, got {longest}",
        )
    if params.min_new_tokens < 0:
        raise InvalidRequest(
            "min_new_tokens", f"min_new_tokens must be at least 0, got {params.min_new_tokens}"
        )
    if longest is not None and params.min_new_tokens > longest:
        raise InvalidRequest(
            "min_new_tokens",
            f"min_new_tokens ({params.min_new_tokens}) is above max_new_tokens ({longest})",
        )


def _check_token_ids(params: SamplingParams, vocab_size: int) -> None:
    bias = params.logit_bias or {}
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(
            "logit_bias",
            f"logit_bias has {len(bias)} entries; at most {MAX_LOGIT_BIAS} are allowed",
        )
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(
            "stop_token_ids",
            f"stop_token_ids has {len(params.stop_token_ids)} entries; "
            f"at most {MAX_STOP_TOKEN_IDS} are allowed",
        )
    for field, ids in (("logit_bias", bias), ("stop_token_ids", params.stop_token_ids)):
        for token_id in ids:
            if not 0 <= token_id < vocab_size:
                raise InvalidRequest(
                    field, f"{field}: token id {token_id} is outside 0..{vocab_size - 1}"
                )
    for token_id, value in bias.items():
        if not (math.isfinite(value) and -100.0 <= value <= 100.0):
            raise InvalidRequest(
                "logit_bias", f"logit_bias[{token_id}] must be between -100 and 100, got {value}"
            )


def _check_stop(stop: tuple[str, ...]) -> None:
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidRequest(
            "stop", f"stop has {len(stop)} strings; at most {MAX_STOP_STRINGS} are allowed"
        )
    for text in stop:
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise InvalidRequest(
                "stop", f"a stop string must have 1 to {MAX_STOP_CHARS} characters, got {len(text)}"
            )
