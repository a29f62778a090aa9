"""Turn a TokenizedGenerateReq into a Req, or refuse it with an error that names field and limit.

The front has checked the same bounds; checking again lets the scheduler survive any well-typed
message. Called by core/scheduler.py. PURE.
"""

from array import array
from dataclasses import dataclass

from ...wire.messages import TokenizedGenerateReq
from ...wire.sampling import InvalidRequest, SamplingParams, check_sampling
from .radix_cache import ID_BYTES
from .req import Req


@dataclass(slots=True, frozen=True)
class Limits:
    vocab_size: int
    context_length: int
    pool_tokens: int
    eos_token_ids: frozenset[int]
    max_loras: int = 0  # different adapters in one step


def make_req(message: TokenizedGenerateReq, arrival: int, limits: Limits) -> Req:
    """Raise InvalidRequest, or make a Req with max_new_tokens lowered to fit context and pool."""
    check_sampling(message.sampling, limits.vocab_size)
    if message.sampling.seed is None:
        raise InvalidRequest("seed", "seed must be set by the front")
    ids = _read_ids(message.input_ids, limits)
    longest = min(limits.context_length, limits.pool_tokens)
    asked = message.sampling.max_new_tokens
    room = longest - len(ids)
    return Req(
        rid=message.rid,
        arrival=arrival,
        sampling=message.sampling,
        ids=ids,
        prompt_len=len(ids),
        max_new_tokens=room if asked is None else min(asked, room),
        stop_ids=_stop_ids(message.sampling, limits),
        priority=message.priority,
        tenant=message.tenant,
        namespace=_namespace(message),
        lora_id=message.lora_id,
    )


def _namespace(message: TokenizedGenerateReq) -> str:
    """The prefix cache's namespace: KV depends on the adapter, so each adapter has its own.

    Clients choose namespace names freely, so the prefix keeps them out of other adapters' ones.
    """
    if not message.lora_id and not message.namespace:
        return ""
    return f"{message.lora_id}/{message.namespace}"


def _stop_ids(sampling: SamplingParams, limits: Limits) -> frozenset[int]:
    own = frozenset(sampling.stop_token_ids)
    return own if sampling.ignore_eos else own | limits.eos_token_ids


def _read_ids(data: bytes, limits: Limits) -> "array[int]":
    if not data or len(data) % ID_BYTES:
        raise InvalidRequest("input_ids", "input_ids must hold at least one int32 id")
    ids = array("i")
    ids.frombytes(data)
    low, high = min(ids), max(ids)
    if low < 0 or high >= limits.vocab_size:
        wrong = low if low < 0 else high
        raise InvalidRequest(
            "input_ids", f"input_ids: token id {wrong} is outside 0..{limits.vocab_size - 1}"
        )
    if len(ids) >= limits.context_length:
        raise InvalidRequest(
            "input_ids",
            f"the prompt has {len(ids)} tokens and leaves no room for an answer: "
            f"the context length is {limits.context_length}",
        )
    if len(ids) >= limits.pool_tokens:
        raise InvalidRequest(
            "input_ids",
            f"the prompt has {len(ids)} tokens and leaves no room for an answer: "
            f"the KV pool holds {limits.pool_tokens} tokens (--kv-tokens)",
        )
    return ids
