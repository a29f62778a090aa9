"""Choose the next token of every row of logits on the device: launches of the Triton kernels.

Called by the runner's DeviceSampler; formulas, their order and the uniform numbers are those of
kernels/sampling.py. Nothing is sorted and nothing waits for the host. A row is cut into chunks:

    peak      the largest adjusted logit of each chunk; a greedy row needs no more
    weigh     without filters: each chunk's winner of the draw. With top_k or top_p: the number and
              mass of the ids within each of NUM_CUTS distances of the likeliest
    collect   with filters: lists the ids within the smallest distance that holds all kept ids
    choose    merges the chunks of a row. With filters: bisects for the last kept id, over the list
              or, if it would be too long, over the whole row, and draws

Ids are ordered by (distance from the likeliest, id) as one integer, a rank, so that of equal logits
the lowest id wins, as in the reference. Differences from it: logarithms, by an ulp (one draw in
about 1e6); and masses, summed in float32 without normalising, which can change the last id that
top_p keeps where its bound is met within some 1e-6 of the mass. Chunks and sums depend on the row
alone.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import triton

from ..sampling import Draw, seed_word
from .sampling_kernels import choose, collect, peak, weigh
from .sampling_math import COLUMNS, LARGEST_ID, NUM_CUTS
from .specialisation import Specialisation

CHUNK = 2048  # ids per program
LISTED = 8192  # most ids of a row that are collected
_WARPS = 4  # per chunk; each thread then has as many ids as fill its registers
_ROW_WARPS = 8  # where one program serves a row
# Distances from 1/16 to 18, and one that holds all finite distances.
CUTS = [*(1.5**index / 16 for index in range(NUM_CUTS.value - 1)), torch.finfo(torch.float32).max]
MAX_VOCAB = int(LARGEST_ID.value) + 1


_SIGNATURE = {
    "rows": "*i32",
    "floats": "*fp32",
    "ints": "*i64",
    "edit_ids": "*i32",
    "edit_values": "*fp32",
    "edit_starts": "*i32",
    "allowed": "*i32",
    "peaks": "*fp32",
    "peak_ids": "*i32",
    "scores": "*fp32",
    "score_ids": "*i32",
    "counts": "*i32",
    "masses": "*fp32",
    "cuts": "*fp32",
    "cut_of_row": "*i32",
    "listed_far": "*fp32",
    "listed_ids": "*i32",
    "next_ids": "*i32",
    "last_tokens": "*i32",
}  # types of the pointers; other arguments are i32 or constants


@dataclass(frozen=True, slots=True)
class RowTables:
    """The sampling parameters of R rows; columns are named in sampling_math.py.

    An edit adds its value to the logit of its id; a value of -inf is a ban, in force while the row
    has generated fewer than its MIN_NEW_TOKENS. The edits of chunk c of row r, in any order, are
    entries edit_starts[r, c] to edit_starts[r, c + 1] of the row's lists.
    """

    floats: torch.Tensor  # [R, 8] float32
    ints: torch.Tensor  # [R, 8] int64
    edit_ids: torch.Tensor  # [R, E] int32
    edit_values: torch.Tensor  # [R, E] float32
    edit_starts: torch.Tensor  # [R, chunks + 1] int32
    last_tokens: torch.Tensor  # [R] int32


@dataclass(frozen=True, slots=True)
class Workspace:
    """Buffers that pass results between the kernels of one step, for up to S rows."""

    chunk: int
    cuts: torch.Tensor  # [NUM_CUTS] float32: the distances that `weigh` uses, ascending
    peaks: torch.Tensor  # [S, chunks] float32
    peak_ids: torch.Tensor  # [S, chunks] int32
    scores: torch.Tensor  # [S, chunks] float32
    score_ids: torch.Tensor  # [S, chunks] int32
    counts: torch.Tensor  # [S, NUM_CUTS, chunks] int32
    masses: torch.Tensor  # [S, NUM_CUTS, chunks] float32
    cut_of_row: torch.Tensor  # [S] int32: the smallest cut that holds all kept ids
    listed_far: torch.Tensor  # [S, L] float32: distances
    listed_ids: torch.Tensor  # [S, L] int32


@dataclass(frozen=True, slots=True)
class Needs:
    """The features that a step's rows need; more than a row needs does not change its token."""

    draws: bool = False
    filters: bool = False  # top_k or top_p
    adjusts: bool = False  # penalties, bias or bans

    def covers(self, other: "Needs") -> bool:
        return (
            self.draws >= other.draws
            and self.filters >= other.filters
            and self.adjusts >= other.adjusts
        )


# The combinations that are compiled; each covers those before it.
LADDER = (Needs(), Needs(True), Needs(True, True), Needs(True, True, True))
EVERYTHING = LADDER[-1]


def row_columns(
    how: Draw | None,
    vocab_size: int,
    generated: int,
    min_new_tokens: int = 0,
    penalties: tuple[float, float, float] = (1.0, 0.0, 0.0),
    history: torch.Tensor | None = None,
) -> tuple[list[float], list[int]]:
    """A row of RowTables.floats and one of .ints; `how` None: take the likeliest id.

    `history` [vocab_size] int32, required with penalties (repetition, frequency, presence): twice
    the number of times that an id was generated, plus 1 if it is in prompt or output. The row keeps
    only its address.
    """
    address = 0 if history is None else history.data_ptr()
    floats, ints = [0.0, 1.0, -math.inf, *penalties], [0, generated, min_new_tokens, 0, address]
    if how is not None:
        floats[:2] = how.temperature, how.top_p
        floats[2] = math.log(how.min_p) if how.min_p > 0.0 else -math.inf
        word = seed_word(how.seed)
        ints[0] = word - (1 << 64) if word >> 63 else word
        ints[3] = how.top_k if 0 < how.top_k < vocab_size else 0
    width = COLUMNS.value
    return floats + [0.0] * (width - len(floats)), ints + [0] * (width - len(ints))


def edit_columns(
    bias: Mapping[int, float], banned: Sequence[int], chunk: int, chunks: int
) -> tuple[list[int], list[float], list[int]]:
    """The edits of a row for RowTables: ids, values, and the index of each chunk's first edit."""
    edits = sorted([*bias.items(), *((one, -math.inf) for one in banned)])
    ids = [one for one, _ in edits]
    starts = [bisect_left(ids, chunk * index) for index in range(chunks + 1)]
    return ids, [value for _, value in edits], starts


def workspace(
    num_rows: int, vocab_size: int, device: torch.device, chunk: int = CHUNK, listed: int = LISTED
) -> Workspace:
    """Allocate a Workspace. Raises ValueError for a vocabulary whose ids do not fit a rank."""
    if vocab_size > MAX_VOCAB:
        raise ValueError(f"{vocab_size} ids are more than the {MAX_VOCAB} that can be ranked")
    chunks = triton.cdiv(vocab_size, chunk)

    def table(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return Workspace(
        chunk=chunk,
        cuts=torch.tensor(CUTS, device=device),
        peaks=table(num_rows, chunks, dtype=torch.float32),
        peak_ids=table(num_rows, chunks, dtype=torch.int32),
        scores=table(num_rows, chunks, dtype=torch.float32),
        score_ids=table(num_rows, chunks, dtype=torch.int32),
        counts=table(num_rows, NUM_CUTS.value, chunks, dtype=torch.int32),
        masses=table(num_rows, NUM_CUTS.value, chunks, dtype=torch.float32),
        cut_of_row=table(num_rows, dtype=torch.int32),
        listed_far=table(num_rows, listed, dtype=torch.float32),
        listed_ids=table(num_rows, listed, dtype=torch.int32),
    )


def row_tables(num_rows: int, work: Workspace, edits: int) -> RowTables:
    """Allocate RowTables, for up to `edits` edits per row."""

    def table(columns: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(num_rows, columns, dtype=dtype, device=work.peaks.device)

    return RowTables(
        floats=table(COLUMNS.value, torch.float32),
        ints=table(COLUMNS.value, torch.int64),
        edit_ids=table(edits, torch.int32),
        edit_values=table(edits, torch.float32),
        edit_starts=table(work.peaks.shape[1] + 1, torch.int32),
        last_tokens=torch.zeros(num_rows, dtype=torch.int32, device=work.peaks.device),
    )


def sample(
    logits: torch.Tensor,
    rows: torch.Tensor,
    tables: RowTables,
    work: Workspace,
    next_ids: torch.Tensor,
    vocab_size: int,
    needs: Needs,
    allowed: torch.Tensor | None = None,
) -> None:
    """Choose a token for each of `rows` [S] int32 and update the row; a row of -1 is skipped.

    logits: [S, >= vocab_size] float32 or 16 bit, contiguous along ids. Writes next_ids [S] int32,
    FAILED where no id can be chosen; otherwise also the row's last token, its count of generated
    tokens and its history (a failed row's last token becomes 0, an id with an embedding).
    `allowed` [R, >= vocab_size / 32] int32: bit i % 32 of word i / 32 allows id i. Raises
    ValueError for more rows than the workspace holds.
    """
    num_rows, (capacity, chunks) = rows.shape[0], work.peaks.shape
    if num_rows > capacity:
        raise ValueError(f"{num_rows} rows sample at once, the workspace is for {capacity}")
    if num_rows == 0:
        return
    grid = (chunks, num_rows)
    row_of = (
        logits,
        logits.stride(0),
        logits.shape[1],
        rows,
        tables.floats,
        tables.ints,
        tables.edit_ids,
        tables.edit_values,
        tables.edit_starts,
        tables.edit_ids.stride(0),
        allowed,
        0 if allowed is None else allowed.stride(0),
    )
    peaks, scores = (work.peaks, work.peak_ids), (work.scores, work.score_ids)
    weights = (work.cuts, work.counts, work.masses)
    kept = (work.cut_of_row, work.listed_far, work.listed_ids, work.listed_ids.shape[1])
    sizes = (vocab_size, chunks)
    options = {
        "CHUNK": work.chunk,
        "CHUNKS": triton.next_power_of_2(chunks),
        "ADJUSTED": needs.adjusts,
        "enable_fp_fusion": False,  # a fused multiply-add in a penalty could break a tie
    }
    peak[grid](*row_of, *peaks, *sizes, num_warps=_WARPS, **options)
    if needs.draws:
        seen = (work.peaks, *scores, *weights, *sizes)
        weigh[grid](*row_of, *seen, FILTERS=needs.filters, num_warps=_WARPS, **options)
    if needs.filters:
        collect[grid](*row_of, work.peaks, *weights, *kept, *sizes, num_warps=_WARPS, **options)
    choose[(num_rows,)](
        *row_of,
        *peaks,
        *scores,
        *weights,
        *kept,
        *sizes,
        next_ids,
        tables.last_tokens,
        DRAWS=needs.draws,
        FILTERS=needs.filters,
        num_warps=_ROW_WARPS,
        **options,
    )


def specialisations() -> list[Specialisation]:
    """For a vocabulary of 128k: greedy steps, plain draws, filters, and all with adjustments."""
    names = ("greedy", "draws", "filters", "adjusts")
    return [
        _specialisation(kernel, f"{dtype} {name}", f"*{dtype}", needs)
        for dtype, (name, needs) in product(("fp32", "bf16"), zip(names, LADDER, strict=True))
        for kernel in _kernels(needs)
    ]


def _kernels(needs: Needs) -> list[triton.JITFunction]:
    return [peak, *[weigh] * needs.draws, *[collect] * needs.filters, choose]


def _specialisation(
    kernel: triton.JITFunction, name: str, logits: str, needs: Needs
) -> Specialisation:
    constants = {
        "DRAWS": needs.draws,
        "FILTERS": needs.filters,
        "CHUNK": CHUNK,
        "CHUNKS": triton.next_power_of_2(triton.cdiv(128_256, CHUNK)),
        "ADJUSTED": needs.adjusts,
    }
    if needs != EVERYTHING:  # which is compiled with a mask
        constants["allowed"] = None
    signature = {
        argument: "constexpr"
        if argument in constants
        else logits
        if argument == "logits"
        else _SIGNATURE.get(argument, "i32")
        for argument in kernel.arg_names
    }
    return Specialisation(
        f"sampling {kernel.__name__} {name}",
        kernel,
        signature,
        {argument: constants[argument] for argument in kernel.arg_names if argument in constants},
        _ROW_WARPS if kernel is choose else _WARPS,
        num_stages=1,
    )
