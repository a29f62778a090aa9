"""Whether a prompt and its answer fit the context and the KV pool. PURE.

Called by the front before a text is tokenised and before a request is submitted. Too long prompts
get the error code on which clients shorten their prompts.
"""

import msgspec

from ..wire.messages import SchedulerInfo
from ..wire.sampling import InvalidRequest, SamplingParams
from .limits import MAX_CHARS_PER_TOKEN

NO_LIMIT = -1  # max_new_tokens: all that fits
TOO_LONG = "context_length_exceeded"


def check_chars(chars: int, info: SchedulerInfo) -> None:
    """Raise InvalidRequest for a text that is too long for the context however it is tokenised."""
    limit = info.context_length * MAX_CHARS_PER_TOKEN
    if chars > limit:
        raise InvalidRequest(
            "prompt",
            f"the prompt has {chars} characters; a context of {info.context_length} tokens "
            f"takes at most {limit}",
            TOO_LONG,
        )


def check_ids(input_ids: list[int], vocab_size: int) -> None:
    if not input_ids:
        raise InvalidRequest("input_ids", "the prompt is empty")
    if min(input_ids) >= 0 and max(input_ids) < vocab_size:
        return
    index, token_id = next(
        (index, token_id)
        for index, token_id in enumerate(input_ids)
        if not 0 <= token_id < vocab_size
    )
    raise InvalidRequest(
        "input_ids", f"token id {token_id} at index {index} is outside 0..{vocab_size - 1}"
    )


def check_fits(prompt_tokens: int, info: SchedulerInfo) -> None:
    """Raise InvalidRequest unless the prompt leaves room for one token of an answer."""
    limit, what = room(info)
    if prompt_tokens >= limit:
        raise InvalidRequest(
            "input_ids",
            f"the prompt has {prompt_tokens} tokens; {what} {limit}, one of them for the answer",
            TOO_LONG,
        )


def room(info: SchedulerInfo) -> tuple[int, str]:
    """Return the most tokens of prompt and answer together, and the name of that limit."""
    if info.max_total_tokens < info.context_length:
        return info.max_total_tokens, "the KV pool has room for"
    return info.context_length, "the context has"


def resolve_lengths(
    prompt_tokens: int, sampling: SamplingParams, info: SchedulerInfo
) -> SamplingParams:
    """Fill in max_new_tokens, or raise InvalidRequest naming the broken limit."""
    limit, what = room(info)
    most = limit - prompt_tokens
    wanted = sampling.max_new_tokens
    if wanted is not None and wanted > most:
        raise InvalidRequest(
            "max_new_tokens",
            f"the prompt has {prompt_tokens} tokens and max_new_tokens is {wanted}; "
            f"{what} {limit} for both",
            TOO_LONG,
        )
    if sampling.min_new_tokens > (wanted or most):
        raise InvalidRequest(
            "min_new_tokens",
            f"min_new_tokens ({sampling.min_new_tokens}) is above the {most} tokens that fit",
        )
    return sampling if wanted else msgspec.structs.replace(sampling, max_new_tokens=most)
