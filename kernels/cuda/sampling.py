"""The next token of every row of logits, chosen on the device: Triton kernels and their launch.

Called by the runner's DeviceSampler; formulas, their order and the uniform numbers are those of
kernels/sampling.py. Nothing is sorted and nothing waits for the host. A row is cut into chunks:

    peak      each chunk's largest adjusted logit; a greedy row needs no more
    weigh     a plain row: each chunk's winner of the draw. A row with top_k or top_p: how many ids
              lie within some distances of the likeliest, and how much mass
    collect   such a row: the ids within the smallest of these distances that holds all that is kept
    choose    merges the chunks of a row. With top_k or top_p: bisects for the last id kept, over
              what was collected, or over the whole row if that is too much, and draws

Ids are ordered by (distance from the likeliest, id) as one integer, a rank, so that ties need no
care: the lowest ids win, as in the reference. What may differ from it: logarithms by an ulp (a draw
in about 1e6), and masses, summed here in float32 without normalising: the last id that top_p keeps,
where its border is met within some 1e-6 of the mass. Chunks and sums depend on the row alone.
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

CHUNK = 2048  # ids of one program
LISTED = 8192  # ids of a row that are collected at most
_WARPS = 4  # of a chunk; as many ids to a thread as fill its registers
_ROW_WARPS = 8  # where one program works on a row
# Distances from 1/16 to 18, and all that are finite.
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
}  # of the pointers; all else that is no constant is i32


@dataclass(frozen=True, slots=True)
class RowTables:
    """What R rows asked for; columns are named in sampling_math.py.

    An edit adds its value to the logit of its id; a value of -inf is a ban, in force while the row
    has generated less than its MIN_NEW_TOKENS. Those of chunk c of row r, in any order, are entries
    edit_starts[r, c] to edit_starts[r, c + 1] of the row's lists.
    """

    floats: torch.Tensor  # [R, 8] float32
    ints: torch.Tensor  # [R, 8] int64
    edit_ids: torch.Tensor  # [R, E] int32
    edit_values: torch.Tensor  # [R, E] float32
    edit_starts: torch.Tensor  # [R, chunks + 1] int32
    last_tokens: torch.Tensor  # [R] int32


@dataclass(frozen=True, slots=True)
class Workspace:
    """What the kernels of one step tell each other, for up to S rows. Nothing in it outlives it."""

    chunk: int
    cuts: torch.Tensor  # [NUM_CUTS] float32: the distances at which rows are weighed, ascending
    peaks: torch.Tensor  # [S, chunks] float32
    peak_ids: torch.Tensor  # [S, chunks] int32
    scores: torch.Tensor  # [S, chunks] float32
    score_ids: torch.Tensor  # [S, chunks] int32
    counts: torch.Tensor  # [S, NUM_CUTS, chunks] int32
    masses: torch.Tensor  # [S, NUM_CUTS, chunks] float32
    cut_of_row: torch.Tensor  # [S] int32: the cut within which all lies that is kept
    listed_far: torch.Tensor  # [S, L] float32: distances
    listed_ids: torch.Tensor  # [S, L] int32


@dataclass(frozen=True, slots=True)
class Needs:
    """What some row of a step needs; a row gets the same token with more of it than it needs."""

    draws: bool = False
    filters: bool = False  # top_k or top_p
    adjusts: bool = False  # penalties, bias or bans

    def covers(self, other: "Needs") -> bool:
        return (
            self.draws >= other.draws
            and self.filters >= other.filters
            and self.adjusts >= other.adjusts
        )


# The combinations that are compiled: each does all that those before it do.
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
    """A row of RowTables.floats and one of .ints; `how` None means the likeliest id.

    `history` [vocab_size] int32, needed where penalties (repetition, frequency, presence) are:
    twice the number of times that an id was generated, plus 1 if it is in prompt or output. Its
    address is all that the row keeps.
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
    """The edits of a row as RowTables keeps them: ids, values, and where those of a chunk start."""
    edits = sorted([*bias.items(), *((one, -math.inf) for one in banned)])
    ids = [one for one, _ in edits]
    starts = [bisect_left(ids, chunk * index) for index in range(chunks + 1)]
    return ids, [value for _, value in edits], starts


def workspace(
    num_rows: int, vocab_size: int, device: torch.device, chunk: int = CHUNK, listed: int = LISTED
) -> Workspace:
    """Raises ValueError for a vocabulary whose ids do not fit a rank."""
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
    """For up to `edits` edits a row."""

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
    """Choose a token for each of `rows` [S] int32 and note it; a row of -1 is passed over.

    logits: [S, >= vocab_size] float32 or 16 bit, contiguous along ids. Writes next_ids [S] int32,
    FAILED where nothing can be chosen; elsewhere also the row's last token, its number of generated
    tokens and its history (of a failed row, last_tokens becomes 0: an id that can be looked up).
    `allowed` [R, >= vocab_size / 32] int32: bit i % 32 of word i / 32 allows id i. Raises
    ValueError for more rows than the workspace is for.
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
        "enable_fp_fusion": False,  # a fused penalty could break a tie
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
    if needs != EVERYTHING:  # there with a mask, too
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
