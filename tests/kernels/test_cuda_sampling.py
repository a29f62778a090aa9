"""The sampling kernels, interpreted, against kernels/sampling.py: the same ids."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import pytest
import torch

from tokenloom.kernels.cuda import sampling as kernel
from tokenloom.kernels.cuda.sampling import EVERYTHING, Needs
from tokenloom.kernels.sampling import FAILED, Draw, choose_reference, penalise

CHUNK = 16
# On a device the same arithmetic is silent.
INTERPRETED_OVERFLOW = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


@dataclass(frozen=True)
class Wish:
    """What one row asks for."""

    how: Draw | None = None
    penalties: tuple[float, float, float] = (1.0, 0.0, 0.0)
    prompt: Sequence[int] = ()
    output: Sequence[int] = ()
    bias: Mapping[int, float] = field(default_factory=dict)
    banned: Sequence[int] = ()
    min_new_tokens: int = 0

    def expected(self, logits: torch.Tensor) -> int:
        counts = torch.bincount(torch.tensor(self.output, dtype=torch.int64), minlength=len(logits))
        seen = counts.bool()
        seen[list(self.prompt)] = True
        logits = penalise(logits.float(), counts.float(), seen, self.penalties)
        for one, value in self.bias.items():
            logits[one] += value
        if len(self.output) < self.min_new_tokens:
            logits[list(self.banned)] = -math.inf
        return choose_reference(logits, self.how)


def draw(
    temperature: float = 1.0,
    top_k: int = -1,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    position: int = 0,
) -> Draw:
    return Draw(temperature, top_k, top_p, min_p, seed, position)


def random_logits(seed: int, rows: int, vocab: int, spread: float = 3.0) -> torch.Tensor:
    return spread * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


class Bench:
    """Tables and workspace, filled with what must not matter, for one step of some wishes."""

    def __init__(
        self, wishes: Sequence[Wish], vocab: int, chunk: int = CHUNK, listed: int = 2 * CHUNK
    ) -> None:
        self.vocab = vocab
        self.num = len(wishes)
        self.work = kernel.workspace(self.num, vocab, torch.device("cpu"), chunk, listed)
        for buffer in (self.work.peaks, self.work.scores, self.work.masses, self.work.listed_far):
            buffer.fill_(math.nan)
        for buffer in (
            self.work.peak_ids,
            self.work.score_ids,
            self.work.counts,
            self.work.cut_of_row,
            self.work.listed_ids,
        ):
            buffer.fill_(1 << 30)
        self.tables = kernel.row_tables(self.num, self.work, edits=8)
        self.histories = [self._history(wish) for wish in wishes]
        for row, wish in enumerate(wishes):
            self._open(row, wish)
        self.next_ids = torch.full((self.num,), -77, dtype=torch.int32)

    def _history(self, wish: Wish) -> torch.Tensor | None:
        if wish.penalties == (1.0, 0.0, 0.0):
            return None
        history = torch.zeros(self.vocab, dtype=torch.int32)
        for one in wish.output:
            history[one] += 2
        history[[*wish.prompt, *wish.output]] |= 1
        return history

    def _open(self, row: int, wish: Wish) -> None:
        floats, ints = kernel.row_columns(
            wish.how,
            self.vocab,
            len(wish.output),
            wish.min_new_tokens,
            wish.penalties,
            self.histories[row],
        )
        self.tables.floats[row] = torch.tensor(floats)
        self.tables.ints[row] = torch.tensor(ints)
        chunks = self.work.peaks.shape[1]
        ids, values, starts = kernel.edit_columns(wish.bias, wish.banned, self.work.chunk, chunks)
        self.tables.edit_ids[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        self.tables.edit_values[row, : len(ids)] = torch.tensor(values)
        self.tables.edit_starts[row] = torch.tensor(starts)

    def sample(
        self,
        logits: torch.Tensor,
        needs: Needs = EVERYTHING,
        allowed: torch.Tensor | None = None,
        rows: Sequence[int] | None = None,
    ) -> list[int]:
        step = torch.tensor(range(self.num) if rows is None else rows, dtype=torch.int32)
        kernel.sample(
            logits, step, self.tables, self.work, self.next_ids, self.vocab, needs, allowed
        )
        return self.next_ids.tolist()


def check(
    logits: torch.Tensor,
    wishes: Sequence[Wish],
    vocab: int | None = None,
    chunk: int = CHUNK,
    listed: int = 2 * CHUNK,
) -> None:
    vocab = vocab or logits.shape[1]
    got = Bench(wishes, vocab, chunk, listed).sample(logits)
    known = logits[:, :vocab]
    assert got == [wish.expected(row) for row, wish in zip(known, wishes, strict=True)]


def drawing(all_filters: Sequence[Mapping[str, float]], temperature: float = 1.0) -> list[Wish]:
    """A row for each: with seeds and positions of their own."""
    return [
        Wish(draw(temperature, **filters, seed=7 - 3 * k, position=k), output=[0] * k)
        for k, filters in enumerate(all_filters)
    ]


FILTERS: list[dict[str, float]] = [
    {},
    {"top_k": 5},
    {"top_k": 36},
    {"top_p": 1e-45},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7},
    {"top_k": 8, "min_p": 0.1},
    {"top_p": 0.8, "min_p": 0.2},
    {"top_k": 30, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("vocab", [1, 16, 37, 300])
def test_greedy_takes_the_largest_and_of_ties_the_lowest_id(vocab: int) -> None:
    logits = random_logits(0, 3, vocab)
    logits[1] = 1.0
    logits[2].round_()
    got = Bench([Wish()] * 3, vocab, chunk=64).sample(logits, Needs())
    assert got == logits.argmax(-1).tolist()


def test_plain_draws_use_the_numbers_of_the_reference() -> None:
    """Over flat logits the noise alone decides."""
    seeds = [0, 1, -1, 42, (1 << 63) - 1, -(1 << 63)]
    wishes = [
        Wish(draw(seed=seed, position=position), output=[0] * position)
        for seed in seeds
        for position in (0, 1, 300)
    ]
    flat = torch.zeros(len(wishes), 64)
    got = Bench(wishes, 64, chunk=32).sample(flat, Needs(draws=True))
    assert got == [wish.expected(row) for row, wish in zip(flat, wishes, strict=True)]
    assert len(set(got)) > 10


@pytest.mark.parametrize(("vocab", "temperature"), [(37, 0.7), (64, 1e-4), (64, 100.0)])
def test_every_filter_alone_and_combined(vocab: int, temperature: float) -> None:
    wishes = drawing(FILTERS if vocab == 37 else FILTERS[1::3], temperature)
    check(random_logits(vocab, len(wishes), vocab), wishes)


def test_of_ties_at_the_border_the_lowest_ids_are_kept() -> None:
    filters = [{"top_k": 5}, {"top_k": 12, "top_p": 0.6}, {"top_p": 0.5}, {"top_p": 0.9}]
    logits = random_logits(5, 6, 37).round()
    logits[4:] = 0.0
    check(logits, drawing([*filters, {"top_k": 3}, {"top_p": 0.5}]))


@pytest.mark.parametrize("listed", [1, 32, 64])
def test_a_row_that_keeps_more_than_can_be_listed_is_gone_through_whole(listed: int) -> None:
    wishes = drawing([{"top_k": 50, "top_p": 0.99}, {"top_p": 0.97}, {"top_k": 9}])
    check(random_logits(6, 3, 64, spread=0.1), wishes, listed=listed)


def test_such_a_row_is_gone_through_to_its_end() -> None:
    rising = 0.3 * torch.arange(64.0).expand(2, 64)
    check(rising, drawing([{"top_k": 5}, {"top_p": 0.6}]), listed=1)


def test_top_p_is_a_share_of_all_mass_and_not_of_what_is_near() -> None:
    """Ten ids hold 0.29 of the mass; the rest lies a little beyond the first of the distances."""
    logits = torch.zeros(3, 37)
    logits[:, 10:] = -0.07
    check(logits, drawing([{"top_p": 0.28}] * 3))


def test_a_larger_vocabulary_in_larger_chunks() -> None:
    wishes = drawing([{}, {"top_k": 40}, {"top_p": 0.9}, {"top_k": 299}])
    check(random_logits(7, 4, 300), wishes, chunk=64, listed=64)


def test_logits_wider_than_the_vocabulary_are_not_looked_at() -> None:
    logits = random_logits(8, 3, 50)
    logits[:, 37:] = torch.tensor([math.nan, math.inf, 99.0])[:, None]
    wishes = [Wish(), *drawing([{"top_k": 10}, {}])]
    check(logits, [replace(wish, bias={36: 1.0}) for wish in wishes], vocab=37)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits(dtype: torch.dtype) -> None:
    logits = random_logits(9, 4, 37).to(dtype)
    check(logits, [Wish(), *drawing([{}, {"top_k": 5}, {"top_p": 0.8}])])


PAST = {"prompt": [1, 2, 2, 20], "output": [3, 2, 3, 3, 30]}


def test_penalties_bias_and_bans_before_greedy_and_draws() -> None:
    adjustments = [
        Wish(penalties=(1.7, 0.0, 0.0), **PAST),
        Wish(penalties=(0.4, 0.0, 0.0), **PAST),
        Wish(penalties=(1.0, 1.1, 0.0), **PAST),
        Wish(penalties=(1.0, 0.0, -1.3), **PAST),
        Wish(penalties=(1.2, 0.3, 0.2), **PAST, bias={3: 2.0, 17: 4.0, 36: 3.5}),
        Wish(bias={0: -100.0, 15: 5.0, 16: 5.0}, output=[1]),
        Wish(banned=[4, 16, 31], min_new_tokens=2, output=[1]),
        Wish(banned=[4, 16, 31], min_new_tokens=1, output=[1]),
        Wish(banned=[15], bias={15: 100.0, 14: 2.0}, min_new_tokens=2, output=[1]),
    ]
    logits = random_logits(10, len(adjustments), 37)
    logits[6:8, 16] = 20.0
    hot = [
        replace(wish, how=draw(1.5, seed=k, position=len(wish.output)))
        for k, wish in enumerate(adjustments)
    ]
    check(torch.cat([logits, logits]), adjustments + hot)


def test_a_filter_looks_at_adjusted_logits() -> None:
    how = draw(top_k=4, top_p=0.95, seed=3, position=5)
    wishes = [
        Wish(how, penalties=(1.5, 0.5, 0.2), **PAST, bias={3: 9.0}),
        Wish(how, penalties=(1.5, 0.5, 0.2), **PAST, banned=[3], min_new_tokens=6, bias={3: 9.0}),
    ]
    check(random_logits(11, 2, 37), wishes)
    check(random_logits(11, 2, 37), wishes, listed=1)


def bits(allowed: torch.Tensor) -> torch.Tensor:
    """Packed: [R, V] bool to [R, ceil(V / 32)] int32."""
    words = -(-allowed.shape[1] // 32)
    wide = torch.zeros(allowed.shape[0], words * 32, dtype=torch.int64)
    wide[:, : allowed.shape[1]] = allowed
    packed = (wide.view(-1, words, 32) << torch.arange(32)).sum(-1)
    return packed.to(torch.int32)  # wraps


def test_a_mask_allows_what_it_allows() -> None:
    logits = random_logits(12, 5, 70)
    allowed = torch.rand(5, 70, generator=torch.Generator().manual_seed(1)) < 0.2
    allowed[0] = True
    allowed[1] = False
    allowed[2] = torch.arange(70) == 31
    wishes = [Wish(), Wish(), *drawing([{}, {"top_k": 3}, {"top_p": 0.7}])]
    got = Bench(wishes, 70).sample(logits, allowed=bits(allowed))
    logits[~allowed] = -math.inf
    assert got == [wish.expected(row) for row, wish in zip(logits, wishes, strict=True)]
    assert got[1:3] == [FAILED, 31]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_from_which_nothing_can_be_chosen_fails_alone(bad: float) -> None:
    logits = random_logits(13, 6, 37)
    where = slice(None) if bad == -math.inf else 20
    logits[1, where] = logits[3, where] = logits[5, where] = bad
    wishes = [wish for one in (Wish(), *drawing([{}, {"top_k": 5}])) for wish in (one, one)]
    bench = Bench(wishes, 37)
    bench.tables.last_tokens.fill_(9)
    got = bench.sample(logits)
    assert got == [wish.expected(row) for row, wish in zip(logits, wishes, strict=True)]
    assert got[1::2] == [FAILED] * 3
    assert bench.tables.last_tokens[1::2].tolist() == [0] * 3
    assert bench.tables.ints[:, 1].tolist() == [1, 0, 1, 0, 2, 1]


@INTERPRETED_OVERFLOW
def test_overflowing_penalties_fail_and_a_banned_infinity_does_not() -> None:
    logits = torch.zeros(2, 37)
    logits[0, 2] = 3e38
    logits[1, 2] = math.inf
    wishes = [Wish(penalties=(0.01, 0.0, 0.0), prompt=[2]), Wish(banned=[2], min_new_tokens=1)]
    check(logits, wishes)
    assert Bench(wishes, 37).sample(logits) == [FAILED, 0]


@INTERPRETED_OVERFLOW
def test_huge_and_infinite_distances_are_never_drawn() -> None:
    logits = torch.full((3, 37), -math.inf)
    logits[:, 7] = 3e38
    logits[:, 8] = -3e38
    check(logits, drawing([{}, {"top_k": 10}, {"top_p": 0.999}], temperature=100.0))


def test_a_sampled_token_is_noted() -> None:
    wish = Wish(penalties=(1.0, 5.0, 0.0), prompt=[3])
    bench = Bench([wish], 37)
    logits = torch.zeros(1, 37)
    logits[0, 3], logits[0, 30] = 9.0, 6.0
    assert [bench.sample(logits)[0] for _ in range(3)] == [3, 30, 3]
    assert bench.tables.last_tokens.tolist() == [3]
    assert bench.tables.ints[0, 1] == 3
    (history,) = bench.histories
    assert history is not None
    assert (history[3], history[30], history.sum()) == (5, 3, 8)


def test_padding_does_nothing_and_rows_stand_in_any_order() -> None:
    wishes = [Wish(), *drawing([{}, {"top_k": 5}], temperature=3.0)]
    logits = random_logits(14, 5, 37)
    bench = Bench([*wishes, Wish(penalties=(1.1, 0.0, 0.0)), Wish()], 37)
    before = [table.clone() for table in (bench.tables.ints, bench.tables.last_tokens)]
    got = bench.sample(logits, rows=[2, -1, 0, -1, 1])
    assert got == [
        wishes[2].expected(logits[0]), -77,
        wishes[0].expected(logits[2]), -77,
        wishes[1].expected(logits[4]),
    ]  # fmt: skip
    before[0][:3, 1] += 1
    before[1][:3] = torch.tensor([got[2], got[4], got[0]])
    assert torch.equal(bench.tables.ints, before[0])
    assert torch.equal(bench.tables.last_tokens, before[1])
    bench.sample(logits, rows=[-1] * 5)
    assert torch.equal(bench.tables.ints, before[0])
    assert bench.sample(logits[:0], rows=[]) == bench.next_ids.tolist()


def test_a_row_gets_the_same_id_from_kernels_that_could_do_more() -> None:
    greedy, plain, filtered = Wish(), *drawing([{"min_p": 0.01}, {"top_k": 5}])
    logits = random_logits(15, 1, 37)
    for wish, needed in ((greedy, Needs()), (plain, Needs(True)), (filtered, Needs(True, True))):
        ids = {Bench([wish], 37).sample(logits, needs)[0] for needs in (needed, EVERYTHING)}
        assert ids == {wish.expected(logits[0])}


def test_a_vocabulary_that_cannot_be_ranked_is_refused() -> None:
    with pytest.raises(ValueError, match="1048577 ids are more than the 1048576"):
        kernel.workspace(1, (1 << 20) + 1, torch.device("cpu"))


def test_every_kernel_is_listed_for_both_widths_of_logits() -> None:
    listed = kernel.specialisations()
    assert len({one.name for one in listed}) == len(listed) == 2 * (2 + 3 + 4 + 4)
    for one in listed:
        assert set(one.signature) == set(one.kernel.arg_names)
        assert {name for name, kind in one.signature.items() if kind == "constexpr"} == set(
            one.constants
        )
