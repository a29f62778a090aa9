"""Elementwise arithmetic of the sampling kernels: adjusted logits, noise, keys and ranks.

Called inside the kernels of sampling_kernels.py; formulas and their order are those of
kernels/sampling.py. No grid, no reduction over a row.
"""

import triton
import triton.language as tl

# Columns of RowTables.floats and .ints [R, COLUMNS].
COLUMNS = tl.constexpr(8)
TEMPERATURE = tl.constexpr(0)  # 0: take the likeliest id
TOP_P = tl.constexpr(1)
LOG_MIN_P = tl.constexpr(2)  # -inf: off
REPETITION = tl.constexpr(3)
FREQUENCY = tl.constexpr(4)
PRESENCE = tl.constexpr(5)
SEED_WORD = tl.constexpr(0)
GENERATED = tl.constexpr(1)
MIN_NEW_TOKENS = tl.constexpr(2)
TOP_K = tl.constexpr(3)  # 0: off
HISTORY = tl.constexpr(4)  # address of the row's int32 [V], 0: no penalties

ID_BITS = tl.constexpr(20)  # low bits of a rank
LARGEST_ID = tl.constexpr((1 << 20) - 1)
NUM_CUTS = tl.constexpr(16)
_GOLDEN64 = tl.constexpr(0x9E3779B97F4A7C15)
_LARGEST_BELOW_1 = tl.constexpr(1.0 - 2.0**-24)


@triton.jit
def adjusted(wanted, chunk, ids, ADJUSTED: tl.constexpr) -> tl.tensor:
    """Logits [N] float32 of a chunk's ids after penalties, bias, bans and mask.

    `wanted` is a tuple, built by the kernels, of the whole tables and the row. Logits beyond the
    vocabulary are -inf.
    """
    (
        logits, logits_stride, width, step_row, row, floats, ints, edit_ids, edit_values,
        edit_starts, edits, allowed, allowed_stride, vocab_size, chunks,
    ) = wanted  # fmt: skip
    known = ids < vocab_size
    # Mask by the width, often a multiple of 16 where the vocabulary is not, to get wide loads.
    logits += step_row * logits_stride
    x = tl.load(logits + ids, mask=ids < width, other=float("-inf")).to(tl.float32)
    if ADJUSTED:
        floats += row * COLUMNS
        ints += row * COLUMNS
        address = tl.load(ints + HISTORY)
        if address != 0:
            x = _penalised(x, address, ids, known, floats)
        banning = tl.load(ints + GENERATED) < tl.load(ints + MIN_NEW_TOKENS)
        edit_starts += row * (chunks + 1) + chunk
        for edit in range(tl.load(edit_starts), tl.load(edit_starts + 1)):
            edited = ids == tl.load(edit_ids + row * edits + edit)
            value = tl.load(edit_values + row * edits + edit)
            if value > float("-inf"):
                x = tl.where(edited, x + value, x)
            elif banning:
                x = tl.where(edited, float("-inf"), x)
    if allowed is not None:
        words = tl.load(allowed + row * allowed_stride + ids // 32, mask=known, other=0)
        x = tl.where(((words >> (ids % 32)) & 1) != 0, x, float("-inf"))
    return tl.where(known, x, float("-inf"))


@triton.jit
def _penalised(x, address, ids, known, floats):
    history = tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)
    past = tl.load(history + ids, mask=known, other=0)
    repetition = tl.load(floats + REPETITION)
    repeated = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
    x = tl.where(past != 0, repeated, x)
    count = past >> 1
    presence = tl.where(count > 0, tl.load(floats + PRESENCE), 0.0)
    return x - (tl.load(floats + FREQUENCY) * count.to(tl.float32) + presence)


@triton.jit
def noise(ids, ints) -> tl.tensor:
    """Gumbel noise [N] of the row's next draw, equal to kernels.sampling.gumbel."""
    first, second = _stream_key(ints)
    x = ids.to(tl.uint32) + first
    x = x ^ (x >> 16)
    x = x * 0x21F0AAAD
    x = (x ^ (x >> 15)) + second
    x = x * 0xD35A2D97
    x = x ^ (x >> 15)
    u = ((x & 0x7FFFFFFF).to(tl.float32) + 0.5) * (2.0**-31)
    u = tl.minimum(u, _LARGEST_BELOW_1)
    rest = 1.0 - u  # Kahan's log1p(-u)
    rounded = 1.0 - rest
    exact = tl.where(rounded > 0, -tl.log(rest) * tl.div_rn(u, tl.maximum(rounded, 2.0**-25)), u)
    return -tl.log(exact)


@triton.jit
def _stream_key(ints):
    """kernels.sampling.stream_key of a seed that was already hashed when the row was opened."""
    x = tl.load(ints + SEED_WORD) ^ tl.load(ints + GENERATED)
    x = x.to(tl.uint64) + _GOLDEN64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return x.to(tl.uint32), (x >> 32).to(tl.uint32)


@triton.jit
def rank(far, ids) -> tl.tensor:
    """Rank [N] int64: ascending from the likeliest id, of equal distances the lower id first."""
    return (far.to(tl.int32, bitcast=True).to(tl.int64) << ID_BITS) | ids.to(tl.int64)
