"""Size the KV pool in tokens, by pure arithmetic: nothing is measured here.

Called once by the model runner at start-up, which logs the reason of the choice.
"""

import math
from dataclasses import dataclass

from ...model_files.errors import ModelError

# Defaults for a pool. On a CPU other processes need memory too, so a pool takes less and is capped;
# a device's memory is ours.
DEFAULT_CPU_BYTES = 2 << 30
CPU_FRACTION, DEVICE_FRACTION = 0.5, 0.9
# The least tokens of one context that a pool chosen here must hold; --kv-tokens may go lower.
_SMALLEST_USEFUL_TOKENS = 512
_SMALLEST_TOKENS = 2  # one of prompt and one of answer


@dataclass(slots=True, frozen=True)
class PoolNeeds:
    bytes_per_token: int
    page_size: int
    context_length: int
    max_running_requests: int
    available_bytes: int  # free after the weights were loaded
    mem_fraction: float
    kv_tokens: int | None
    cap_bytes: int | None = DEFAULT_CPU_BYTES  # None on a device


@dataclass(slots=True, frozen=True)
class PoolSize:
    tokens: int  # a multiple of the page size, without the padding page
    reason: str


def size_kv_pool(needs: PoolNeeds) -> PoolSize:
    """Raises ModelError, naming the flag to change, when no usable pool fits."""
    if needs.kv_tokens is not None:
        return _asked_for(needs, needs.kv_tokens)
    limit, why = min(_limits(needs))
    tokens = limit // needs.page_size * needs.page_size
    smallest = _page_up(min(needs.context_length, _SMALLEST_USEFUL_TOKENS), needs)
    if tokens < smallest:
        raise ModelError(_too_small(needs, tokens, smallest))
    return PoolSize(tokens, _sentence(needs, tokens, why))


def _limits(needs: PoolNeeds) -> list[tuple[int, str]]:
    """Upper bounds in tokens, each with its reason."""
    share = int(needs.available_bytes * needs.mem_fraction)
    useful = needs.max_running_requests * _page_up(needs.context_length, needs)
    cap = needs.cap_bytes
    return [
        (
            share // needs.bytes_per_token,
            f"--mem-fraction {needs.mem_fraction:g} of {_size(needs.available_bytes)} free memory",
        ),
        (
            useful,
            f"{needs.max_running_requests} requests of {needs.context_length} tokens "
            "(--max-running-requests) use no more",
        ),
        *(
            (
                bound // needs.bytes_per_token,
                f"the default cap of {_size(bound)} on a CPU; --kv-tokens overrides it",
            )
            for bound in ([] if cap is None else [cap])
        ),
    ]


def _asked_for(needs: PoolNeeds, kv_tokens: int) -> PoolSize:
    tokens = kv_tokens // needs.page_size * needs.page_size
    smallest = _page_up(_SMALLEST_TOKENS, needs)
    if tokens < smallest:
        raise ModelError(
            f"--kv-tokens {kv_tokens} is too small: it must be at least {smallest} "
            f"with --page-size {needs.page_size}"
        )
    bytes_needed = (tokens + needs.page_size) * needs.bytes_per_token
    if bytes_needed > needs.available_bytes:
        pages = needs.available_bytes // needs.bytes_per_token // needs.page_size - 1
        raise ModelError(
            f"--kv-tokens {kv_tokens} needs {_size(bytes_needed)}, but "
            f"{_size(needs.available_bytes)} are free: at most {max(pages, 0) * needs.page_size} "
            "tokens fit"
        )
    return PoolSize(tokens, _sentence(needs, tokens, f"--kv-tokens {kv_tokens}"))


def _too_small(needs: PoolNeeds, tokens: int, smallest: int) -> str:
    bytes_needed = smallest * needs.bytes_per_token
    message = (
        f"the KV pool would hold {tokens} tokens; it needs {smallest} ({_size(bytes_needed)}, "
        f"{_size(needs.bytes_per_token)} a token), and {_size(needs.available_bytes)} are free: "
    )
    # rounded up to hundredths; the small allowance keeps 0.70 from becoming 0.71
    fraction = math.ceil(100 * bytes_needed / max(needs.available_bytes, 1) - 1e-9) / 100
    if needs.cap_bytes is not None and bytes_needed > needs.cap_bytes:
        return message + f"set --kv-tokens to {smallest}"
    if fraction < 1.0:
        return message + f"raise --mem-fraction to {max(fraction, 0.01):.2f} or set --kv-tokens"
    return message + "free some memory, take a smaller model, or set --kv-tokens lower"


def _sentence(needs: PoolNeeds, tokens: int, why: str) -> str:
    text = (
        f"KV pool: {tokens} tokens, {_size(tokens * needs.bytes_per_token)} "
        f"({_size(needs.bytes_per_token)} a token): {why}"
    )
    if tokens < needs.context_length:
        text += f"; a request can use {tokens} of the model's {needs.context_length} tokens"
    return text


def _page_up(tokens: int, needs: PoolNeeds) -> int:
    return -(-tokens // needs.page_size) * needs.page_size


def _size(num_bytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.1f} {name}"
    return f"{num_bytes / 1024:.1f} KiB"
