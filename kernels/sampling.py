"""Choose one token from one row of logits: penalties, filters, and the counter-based draw.

Called by the runner's sampler. Each row [vocab] float32 is processed alone, so no result can depend
on batch-mates: by the native library on several threads, or with torch operators without it.
Per-request state stays with the caller.

The order is that of Hugging Face transformers' logits processors: penalties, bias and bans, then
temperature, top_k, top_p, min_p, each applied to what the previous one kept. Every filter keeps the
most likely token, so a row with one finite logit always yields a token.

The draw is the Gumbel-max trick: argmax of scaled logits plus -log(-log(u)) is distributed as their
softmax. u is a pure function of (seed, tokens generated so far, token id), so a request yields the
same tokens alone, in any batch, and after a retraction. Unlike a search in a cumulative sum, a
rounding difference of 1e-6 in the logits changes a token about once in 1e6 draws.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .cpu import native

FAILED = -1  # returned instead of an id when the row has no valid choice
_MASK64 = (1 << 64) - 1
_MASK32 = (1 << 32) - 1
_GOLDEN64 = 0x9E3779B97F4A7C15
_LARGEST_BELOW_1 = 1.0 - 2.0**-24
# top_p sorts only ids with at least this fraction of the top probability, if their mass suffices.
_TOP_P_CUTS = (1e-2, 1e-4, 1e-6)


@dataclass(slots=True, frozen=True)
class Draw:
    """How to draw one token. Disabled filters: top_k <= 0, top_p 1, min_p 0."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int  # 64 bits
    position: int  # tokens generated so far

    def filters(self, vocab_size: int) -> bool:
        return 0 < self.top_k < vocab_size or self.top_p < 1.0 or self.min_p > 0.0


def penalise(
    logits: torch.Tensor,
    output_counts: torch.Tensor,
    seen: torch.Tensor,
    penalties: tuple[float, float, float],
) -> torch.Tensor:
    """Apply (repetition, frequency, presence) penalties to logits [V]; returns a new tensor.

    `output_counts` [V] float32 counts generated ids, `seen` [V] bool marks ids of prompt or output.
    Repetition (Keskar et al. 2019, as in transformers): a seen id's positive logit is divided by
    it, a negative one multiplied. Then the OpenAI API's formula:
    logit - frequency * count - presence * (count > 0).
    """
    repetition, frequency, presence = penalties
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(seen, repeated, logits)
    return logits - (frequency * output_counts + presence * (output_counts > 0))


def choose(rows: Sequence[torch.Tensor], hows: Sequence[Draw | None]) -> list[int]:
    """Choose an id from each row of logits [V] float32: draw it, or take the likeliest for None.

    Returns FAILED for a row with NaN or +inf, or with nothing but -inf.
    """
    library = native.find()
    if library is None or (rows and rows[0].device.type != "cpu"):
        return [choose_reference(row, how) for row, how in zip(rows, hows, strict=True)]
    rows = [row.contiguous() for row in rows]
    choices = (native.Choice * len(rows))(*map(_choice, rows, hows))
    library.tl_choose(choices, len(rows), torch.get_num_threads(), library.tl_best_isa())
    return [choice.id for choice in choices]


def _choice(logits: torch.Tensor, how: Draw | None) -> native.Choice:
    pointer, size = logits.data_ptr(), logits.numel()
    if how is None:
        return native.Choice(pointer, size, 0.0, 0, 1.0, 0.0, 0, 0)
    first, second = (word & _MASK32 for word in stream_key(how.seed, how.position))
    return native.Choice(
        pointer, size, how.temperature, how.top_k, how.top_p, how.min_p, first, second
    )


def choose_reference(logits: torch.Tensor, how: Draw | None) -> int:
    """Choose an id from one row with torch operators; the reference for `choose`."""
    best, best_id = logits.max(dim=-1)  # max propagates NaN; ties give the lowest id
    if not math.isfinite(float(best)):
        return FAILED
    if how is None:
        return int(best_id)
    key = stream_key(how.seed, how.position)
    scaled = (logits - best) / how.temperature
    if how.filters(logits.numel()):
        return draw_among(_kept(scaled, how), scaled, key)
    everything = torch.arange(scaled.numel(), dtype=torch.int32, device=scaled.device)
    return int((scaled + gumbel(everything, key)).argmax())


def draw_among(ids: torch.Tensor, scaled: torch.Tensor, key: tuple[int, int]) -> int:
    """Draw one of `ids` [K], ascending, from scaled logits [V]."""
    winner = (scaled[ids] + gumbel(ids.to(torch.int32), key)).argmax()
    return int(ids[winner])


def _kept(scaled: torch.Tensor, how: Draw) -> torch.Tensor:
    """Return the ids [K], ascending, that the filters keep. The maximum of `scaled` must be 0."""
    ids: torch.Tensor | None = None
    if 0 < how.top_k < scaled.numel():
        ids = largest(scaled, how.top_k)
    if how.top_p < 1.0:
        values = scaled if ids is None else scaled[ids]
        likely = nucleus(values, how.top_p)
        ids = likely if ids is None else ids[likely]
    if how.min_p > 0.0:
        # p >= min_p * p_max in log space, where log(p_max) is 0 before normalising
        values = scaled if ids is None else scaled[ids]
        likely = (values >= math.log(how.min_p)).nonzero().squeeze(-1)
        ids = likely if ids is None else ids[likely]
    assert ids is not None, "no filter is on"
    return ids


def largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return indices of the `count` largest of values [V], ascending; ties keep the lowest."""
    return _at_least(values, values.topk(count).values[-1], count)


def nucleus(scaled: torch.Tensor, top_p: float) -> torch.Tensor:
    """Return the indices, ascending, that top_p keeps of scaled logits [V]; at least one.

    That is the smallest set of likeliest ids whose softmax mass reaches top_p (Holtzman et al.
    2020). Ties keep the lowest indices.
    """
    probs = scaled.softmax(-1)
    largest_prob = probs.amax()
    head = probs
    for cut in _TOP_P_CUTS:
        candidates = probs[probs >= cut * largest_prob]
        if float(candidates.sum(dtype=torch.float64)) >= top_p:
            head = candidates
            break
    head = head.sort(descending=True).values
    before = head.cumsum(-1, dtype=torch.float64) - head
    count = int((before < top_p).sum())
    return _at_least(probs, head[count - 1], count)


def _at_least(values: torch.Tensor, threshold: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the `count` largest values; `threshold` is the count-th largest."""
    indices = (values >= threshold).nonzero().squeeze(-1)
    excess = indices.numel() - count
    if excess == 0:
        return indices
    keep = torch.ones_like(indices, dtype=torch.bool)
    keep[(values[indices] == threshold).nonzero().squeeze(-1)[-excess:]] = False
    return indices[keep]


def stream_key(seed: int, position: int) -> tuple[int, int]:
    """Hash (seed, position) to two signed 32-bit words with the splitmix64 finaliser."""
    mixed = _mix64((seed_word(seed) ^ position) + _GOLDEN64)
    return _signed32(mixed), _signed32(mixed >> 32)


def seed_word(seed: int) -> int:
    """Hash a seed to the unsigned 64-bit word that `stream_key` mixes with the position."""
    return _mix64(seed + _GOLDEN64)


def gumbel(ids: torch.Tensor, key: tuple[int, int]) -> torch.Tensor:
    """Compute standard Gumbel noise [N] float32 for token ids [N] int32.

    -log(-log(1 - u)) keeps its relative precision at small u, where the noise is large.
    """
    return -torch.log(-torch.log1p(-uniform(ids, key)))


def uniform(ids: torch.Tensor, key: tuple[int, int]) -> torch.Tensor:
    """Hash ids [N] int32 to numbers [N] float32 in (0, 1).

    A 32-bit integer hash with two multiplications (the constants are lowbias32's, C. Wellons),
    keyed before and between its rounds. int32 arithmetic wraps; `>>` copies the sign: mask it.
    """
    x = ids + key[0]
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x21F0AAAD
    x = (x ^ ((x >> 15) & 0x1FFFF)) + key[1]
    x = x * _signed32(0xD35A2D97)
    x = x ^ ((x >> 15) & 0x1FFFF)
    fraction = ((x & 0x7FFFFFFF).to(torch.float32) + 0.5) * 2.0**-31
    return fraction.clamp_(max=_LARGEST_BELOW_1)


def _mix64(x: int) -> int:
    x &= _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _signed32(x: int) -> int:
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >= 1 << 31 else x
