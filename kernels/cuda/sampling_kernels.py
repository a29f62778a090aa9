"""The four kernels that choose the next token of every row of logits.

Launched by sampling.py beside this file, which describes each kernel and the tables; elementwise
arithmetic is in sampling_math.py. `step_row` is a row of the step, `row` one of the tables. A chunk
is CHUNK ids of a row; CHUNKS is the number of chunks rounded up to a power of 2. `rows` is often a
slice of any alignment, so that kernels do not specialise on it. `far` is an id's distance from the
likeliest: the difference of their scaled logits, inf if the id is never drawn.
"""

import triton
import triton.language as tl

from .sampling_math import (
    COLUMNS,
    GENERATED,
    HISTORY,
    LARGEST_ID,
    LOG_MIN_P,
    NUM_CUTS,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    adjusted,
    noise,
    rank,
)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def peak(
    logits, logits_stride, width, rows, floats, ints, edit_ids, edit_values, edit_starts, edits,
    allowed, allowed_stride, peaks, peak_ids, vocab_size, chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ADJUSTED: tl.constexpr,
) -> None:  # fmt: skip
    """The largest adjusted logit of a chunk and its lowest id; inf if any logit is NaN or inf."""
    chunk, step_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(rows + step_row).to(tl.int64)
    if row < 0:
        return
    wanted = (
        logits, logits_stride, width, step_row, row, floats, ints, edit_ids, edit_values,
        edit_starts, edits, allowed, allowed_stride, vocab_size, chunks,
    )  # fmt: skip
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = adjusted(wanted, chunk, ids, ADJUSTED)
    x = tl.where(x < float("inf"), x, float("inf"))  # NaN becomes inf
    best, at = tl.max(x, 0, return_indices=True)
    tl.store(peaks + step_row * chunks + chunk, best)
    tl.store(peak_ids + step_row * chunks + chunk, chunk * CHUNK + at)


@triton.jit
def _largest(values, step_row, chunks, CHUNKS: tl.constexpr):
    """The largest of a row's values, one per chunk."""
    each = tl.arange(0, CHUNKS)
    value = tl.load(values + step_row * chunks + each, mask=each < chunks, other=-float("inf"))
    return tl.max(value, 0)


@triton.jit
def _drawn(best, temperature):
    """Whether the row draws: it has a temperature, and its largest adjusted logit is finite."""
    return (temperature > 0.0) & (best < float("inf")) & (best > -float("inf"))


@triton.jit
def _filters(floats, ints):
    return (tl.load(ints + TOP_K) > 0) | (tl.load(floats + TOP_P) < 1.0)


@triton.jit
def _score(far, kept, ids, floats, ints):
    """The draw's score, of which the largest wins; -inf for ids not `kept` or below min_p."""
    kept = kept & (-far >= tl.load(floats + LOG_MIN_P)) & (far < float("inf"))
    return tl.where(kept, noise(ids, ints) - far, -float("inf"))


@triton.jit(do_not_specialize_on_alignment=["rows"])
def weigh(
    logits, logits_stride, width, rows, floats, ints, edit_ids, edit_values, edit_starts, edits,
    allowed, allowed_stride, peaks, scores, score_ids, cuts, counts, masses, vocab_size, chunks,
    FILTERS: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ADJUSTED: tl.constexpr,
) -> None:  # fmt: skip
    """A plain row's best score in a chunk, or a filtered row's count and mass within each cut."""
    chunk, step_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(rows + step_row).to(tl.int64)
    if row < 0:
        return
    row_floats, row_ints = floats + row * COLUMNS, ints + row * COLUMNS
    temperature = tl.load(row_floats + TEMPERATURE)
    best = _largest(peaks, step_row, chunks, CHUNKS)
    if not _drawn(best, temperature):
        return
    wanted = (
        logits, logits_stride, width, step_row, row, floats, ints, edit_ids, edit_values,
        edit_starts, edits, allowed, allowed_stride, vocab_size, chunks,
    )  # fmt: skip
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = adjusted(wanted, chunk, ids, ADJUSTED)
    far = tl.div_rn(best - x, temperature)
    filtered = False
    if FILTERS:
        filtered = _filters(row_floats, row_ints)
    if filtered:
        weights = tl.exp(-far)
        for index in range(NUM_CUTS):
            within = far <= tl.load(cuts + index)
            place = (step_row * NUM_CUTS + index) * chunks + chunk
            tl.store(counts + place, tl.sum(within.to(tl.int32), 0))
            tl.store(masses + place, tl.sum(tl.where(within, weights, 0.0), 0))
    else:
        score, at = tl.max(
            _score(far, far >= 0.0, ids, row_floats, row_ints), 0, return_indices=True
        )
        tl.store(scores + step_row * chunks + chunk, score)
        tl.store(score_ids + step_row * chunks + chunk, chunk * CHUNK + at)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def collect(
    logits, logits_stride, width, rows, floats, ints, edit_ids, edit_values, edit_starts, edits,
    allowed, allowed_stride, peaks, cuts, counts, masses,
    cut_of_row, listed_far, listed_ids, listed, vocab_size, chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ADJUSTED: tl.constexpr,
) -> None:  # fmt: skip
    """Choose the cut of a filtered row; list the chunk's ids within it if all of the row's fit."""
    chunk, step_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row = tl.load(rows + step_row).to(tl.int64)
    if row < 0:
        return
    row_floats, row_ints = floats + row * COLUMNS, ints + row * COLUMNS
    temperature = tl.load(row_floats + TEMPERATURE)
    best = _largest(peaks, step_row, chunks, CHUNKS)
    if not (_drawn(best, temperature) & _filters(row_floats, row_ints)):
        return
    every, each = tl.arange(0, NUM_CUTS)[:, None], tl.arange(0, CHUNKS)
    places = (step_row * NUM_CUTS + every) * chunks + each[None, :]
    top_k = tl.load(row_ints + TOP_K)
    if top_k > 0:
        within = tl.load(counts + places, mask=each[None, :] < chunks, other=0)
        reached = tl.sum(within, 1) >= top_k
    else:
        sums = tl.sum(tl.load(masses + places, mask=each[None, :] < chunks, other=0.0), 1)
        reached = sums >= tl.load(row_floats + TOP_P) * tl.max(sums, 0)
    index = tl.min(tl.where(reached, tl.arange(0, NUM_CUTS), NUM_CUTS - 1), 0)
    if chunk == 0:
        tl.store(cut_of_row + step_row, index)
    place = (step_row * NUM_CUTS + index) * chunks
    within = tl.load(counts + place + each, mask=each < chunks, other=0)
    if (tl.load(counts + place + chunk) == 0) | (tl.sum(within, 0) > listed):
        return
    wanted = (
        logits, logits_stride, width, step_row, row, floats, ints, edit_ids, edit_values,
        edit_starts, edits, allowed, allowed_stride, vocab_size, chunks,
    )  # fmt: skip
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    x = adjusted(wanted, chunk, ids, ADJUSTED)
    far = tl.div_rn(best - x, temperature)
    chosen = far <= tl.load(cuts + index)
    before = tl.sum(tl.where(each < chunk, within, 0), 0)
    places = step_row * listed + before + tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(listed_far + places, far, mask=chosen)
    tl.store(listed_ids + places, ids, mask=chosen)


@triton.jit
def _candidates(
    block, wanted, best, temperature, found, CHUNK: tl.constexpr, ADJUSTED: tl.constexpr
):
    """Distances and ids [CHUNK] of a block of the row's list, or of a chunk if none was made."""
    count, fits, listed_far, listed_ids = found
    places = block * CHUNK + tl.arange(0, CHUNK)
    if fits:
        far = tl.load(listed_far + places, mask=places < count, other=float("inf"))
        ids = tl.load(listed_ids + places, mask=places < count, other=0)
    else:
        ids = places
        far = tl.div_rn(best - adjusted(wanted, block, ids, ADJUSTED), temperature)
    return far, ids


@triton.jit
def _upto(
    bound, blocks, wanted, best, temperature, found, CHUNK: tl.constexpr, ADJUSTED: tl.constexpr
):
    """Number of ids of at most the rank `bound`, and their mass relative to the likeliest's."""
    # one sum over the program's threads at the end, not one per block
    numbers, masses = tl.zeros((CHUNK,), tl.int32), tl.zeros((CHUNK,), tl.float32)
    for block in range(blocks):
        far, ids = _candidates(block, wanted, best, temperature, found, CHUNK, ADJUSTED)
        within = rank(far, ids) <= bound
        numbers += within.to(tl.int32)
        masses += tl.where(within, tl.exp(-far), 0.0)
    return tl.sum(numbers, 0), tl.sum(masses, 0)


@triton.jit
def _last_kept(
    low, high, number_low, number_high, top_k, target, blocks, wanted, best, temperature, found,
    CHUNK: tl.constexpr, ADJUSTED: tl.constexpr,
):  # fmt: skip
    """Bisect for the least rank in (low, high] up to which ids reach `top_k` or the mass `target`.

    By number if top_k > 0. Up to `low` there are number_low ids, too few; up to `high` there are
    enough. Also returns the number of ids up to the rank.
    """
    while (high - low > 1) & (number_high - number_low > 1) & (number_high != top_k):
        middle = low + (high - low) // 2
        number, mass = _upto(middle, blocks, wanted, best, temperature, found, CHUNK, ADJUSTED)
        enough = mass >= target
        if top_k > 0:
            enough = number >= top_k
        if enough:
            high = middle
            number_high = number
        else:
            low = middle
            number_low = number
    return high, number_high


@triton.jit
def _draw_filtered(
    step_row, floats, ints, vocab_size, wanted, best, temperature, cuts, counts, masses, cut_of_row,
    listed_far, listed_ids, listed, chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ADJUSTED: tl.constexpr,
):  # fmt: skip
    """Draw an id from those that top_k, then top_p, then min_p keep."""
    index = tl.load(cut_of_row + step_row)
    each = tl.arange(0, CHUNKS)
    place = (step_row * NUM_CUTS + index) * chunks + each
    count = tl.sum(tl.load(counts + place, mask=each < chunks, other=0), 0)
    fits = count <= listed
    blocks = tl.cdiv(tl.where(fits, count, vocab_size), CHUNK)
    found = (count, fits, listed_far + step_row * listed, listed_ids + step_row * listed)
    # the cut before holds too few ids
    number_low = tl.sum(
        tl.load(counts + place - chunks, mask=(each < chunks) & (index > 0), other=0), 0
    )
    last_id = tl.full((), LARGEST_ID, tl.int32)
    low = rank(tl.load(cuts + index - 1, mask=index > 0, other=0.0), last_id)
    low = tl.where(index > 0, low, -1)
    bound, number = rank(tl.load(cuts + index), last_id), count
    top_k = tl.load(ints + TOP_K)
    top_p = tl.load(floats + TOP_P)
    total = 0.0
    if top_k > 0:
        bound, number = _last_kept(
            low, bound, number_low, number, top_k, 0.0, blocks, wanted, best, temperature, found,
            CHUNK, ADJUSTED,
        )  # fmt: skip
        low = tl.full((), -1, tl.int64)
        number_low = 0
        if top_p < 1.0:
            number, total = _upto(bound, blocks, wanted, best, temperature, found, CHUNK, ADJUSTED)
    else:
        place = (step_row * NUM_CUTS + NUM_CUTS - 1) * chunks + each
        total = tl.sum(tl.load(masses + place, mask=each < chunks, other=0.0), 0)
    if top_p < 1.0:
        target = tl.maximum(top_p * total, 1e-30)  # above 0, so that no ids do not reach it
        bound, number = _last_kept(
            low, bound, number_low, number, 0, target, blocks, wanted, best, temperature, found,
            CHUNK, ADJUSTED,
        )  # fmt: skip
    top_score, token = -float("inf"), -1
    for block in range(blocks):
        far, ids = _candidates(block, wanted, best, temperature, found, CHUNK, ADJUSTED)
        kept = rank(far, ids) <= bound
        if tl.max(kept.to(tl.int32), 0) > 0:
            score = _score(far, kept, ids, floats, ints)
            block_score = tl.max(score, 0)
            if block_score > top_score:
                top_score = block_score
                token = tl.min(tl.where(score == block_score, ids, LARGEST_ID), 0)
    return token


@triton.jit(do_not_specialize_on_alignment=["rows"])
def choose(
    logits, logits_stride, width, rows, floats, ints, edit_ids, edit_values, edit_starts, edits,
    allowed, allowed_stride, peaks, peak_ids, scores, score_ids, cuts, counts, masses,
    cut_of_row, listed_far, listed_ids, listed, vocab_size, chunks, next_ids, last_tokens,
    DRAWS: tl.constexpr, FILTERS: tl.constexpr,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, ADJUSTED: tl.constexpr,
) -> None:  # fmt: skip
    """Choose a row's token, and update its last token, count and history."""
    step_row = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + step_row).to(tl.int64)
    if row < 0:
        return
    row_floats, row_ints = floats + row * COLUMNS, ints + row * COLUMNS
    best = _largest(peaks, step_row, chunks, CHUNKS)
    token = -1
    if (best < float("inf")) & (best > -float("inf")):
        token = _winner(best, peaks, peak_ids, step_row, chunks, CHUNKS)
        if DRAWS:
            temperature = tl.load(row_floats + TEMPERATURE)
            filtered = False
            if FILTERS:
                filtered = _filters(row_floats, row_ints) & (temperature > 0.0)
                if filtered:
                    wanted = (
                        logits, logits_stride, width, step_row, row, floats, ints, edit_ids,
                        edit_values, edit_starts, edits, allowed, allowed_stride, vocab_size,
                        chunks,
                    )  # fmt: skip
                    token = _draw_filtered(
                        step_row, row_floats, row_ints, vocab_size, wanted, best, temperature,
                        cuts, counts, masses, cut_of_row, listed_far, listed_ids, listed, chunks,
                        CHUNK, CHUNKS, ADJUSTED,
                    )  # fmt: skip
            if (temperature > 0.0) & (not filtered):
                score = _largest(scores, step_row, chunks, CHUNKS)
                token = _winner(score, scores, score_ids, step_row, chunks, CHUNKS)
    tl.store(next_ids + step_row, token)
    tl.store(last_tokens + row, tl.maximum(token, 0))
    if token >= 0:
        tl.store(row_ints + GENERATED, tl.load(row_ints + GENERATED) + 1)
        address = tl.load(row_ints + HISTORY)
        if address != 0:
            count = address.to(tl.pointer_type(tl.int32)) + token
            tl.store(count, (tl.load(count) + 2) | 1)


@triton.jit
def _winner(most, values, ids, step_row, chunks, CHUNKS: tl.constexpr):
    """The lowest id of the chunks whose value is `most`, the largest of the row."""
    each = tl.arange(0, CHUNKS)
    place = step_row * chunks + each
    value = tl.load(values + place, mask=each < chunks, other=-float("inf"))
    id_of = tl.load(ids + place, mask=each < chunks, other=0)
    return tl.min(tl.where(value == most, id_of, LARGEST_ID), 0)
