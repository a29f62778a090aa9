"""The device's sampler against the host's: the same ids. Kernels run interpreted, on the CPU."""

import math
from array import array
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tokenloom.kernels.cuda.sampling import Needs
from tokenloom.scheduler_proc.runner import device_sampler
from tokenloom.scheduler_proc.runner.device_sampler import DeviceSampler
from tokenloom.scheduler_proc.runner.sampler import FAILED, Sampler
from tokenloom.scheduler_proc.worker_batch import RowOpen
from tokenloom.wire.sampling import SamplingParams

VOCAB = 45
WIDE = 48  # columns of the logits
NUM_ROWS = 9
GREEDY = SamplingParams(temperature=0.0)

# Row by row; a request that bans is told to ban 2 and 40, and 46, which the tokenizer lacks.
WISHES = [
    GREEDY,
    SamplingParams(seed=-5, temperature=0.8),
    SamplingParams(seed=42, top_k=7, top_p=0.9, temperature=1.5),
    SamplingParams(seed=7, repetition_penalty=1.3, frequency_penalty=0.4, min_new_tokens=9),
    SamplingParams(temperature=0.0, presence_penalty=1.5, logit_bias={3: 4.0, 44: -100.0}),
    SamplingParams(seed=9, top_p=0.6, min_new_tokens=2, logit_bias={40: 9.0}),
    SamplingParams(seed=1, top_k=1, temperature=9.0),
    SamplingParams(seed=1, min_p=0.2, top_k=9_999_999, temperature=3.0),
]


def opened(
    row: int,
    sampling: SamplingParams,
    output: Sequence[int] = (),
    prompt: Sequence[int] = (1, 2, 2),
) -> RowOpen:
    banned = (2, 40, 46) if sampling.min_new_tokens else ()
    return RowOpen(row, sampling, array("i", prompt), array("i", output), banned)


def logits_of(step: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    logits = 2 * torch.randn(count, WIDE, generator=generator)
    logits[:, VOCAB:] = 99.0
    return logits


class Pair:
    """The host's sampler and the device's, side by side."""

    def __init__(self) -> None:
        self.host = Sampler(NUM_ROWS, VOCAB)
        self.device = DeviceSampler(NUM_ROWS, VOCAB, torch.device("cpu"), chunk=16, listed=32)

    def open(self, wish: RowOpen) -> None:
        self.host.open(wish)
        self.device.open([wish])

    def step(self, rows: list[int], logits: torch.Tensor) -> list[int]:
        """Both sample and must agree. The device's step is padded with a row of -1."""
        padded = torch.cat([logits, torch.full((1, WIDE), math.nan)])
        device_rows = torch.tensor([*rows, -1], dtype=torch.int32)
        before = self.device.last_tokens.clone()
        ids = self.device.sample(padded, device_rows, self.device.needs(rows))
        got = ids[:-1].tolist()
        assert got == self.host.sample(logits, rows)
        before[rows] = torch.tensor(got, dtype=torch.int32).clamp(min=0)
        assert torch.equal(self.device.last_tokens, before)
        return got


def test_the_same_ids_as_on_the_host_in_mixed_steps() -> None:
    pair = Pair()
    for row, sampling in enumerate(WISHES):
        pair.open(opened(row, sampling))
    steps = [[*range(8)], [7, 2, 5], [3, 4, 0], [4, 3, 1], [6, 5, 3], [3, 4]]
    for step, rows in enumerate(steps):
        pair.step(rows, logits_of(step, len(rows)))


def test_a_row_opened_again_forgets_its_request_and_goes_on_from_its_output() -> None:
    pair = Pair()
    pair.open(opened(0, WISHES[4]))
    pair.open(opened(1, WISHES[5], output=[7]))
    pair.open(opened(2, WISHES[3], output=[5, 5, 8], prompt=[]))
    pair.step([0, 1, 2], logits_of(10, 3))
    pair.open(opened(0, SamplingParams(seed=3)))
    pair.open(opened(1, GREEDY))
    pair.open(opened(2, WISHES[4], output=[3, 3]))
    for step in (11, 12):
        pair.step([0, 1, 2], logits_of(step, 3))


def test_rows_opened_together_take_one_copy_and_sample_as_those_opened_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    brought: list[int] = []
    bring = DeviceSampler._brought

    def counted(self: DeviceSampler, columns: list[NDArray[np.generic]]) -> list[torch.Tensor]:
        brought.append(len(columns))
        return bring(self, columns)

    monkeypatch.setattr(DeviceSampler, "_brought", counted)
    pair = Pair()
    for turn, shift in enumerate((0, 3)):
        wishes = [
            opened((row + shift) % 8, sampling, output=[5, 5, 8][:turn], prompt=range(row))
            for row, sampling in enumerate(WISHES)
        ]
        for wish in wishes:
            pair.host.open(wish)
        pair.device.open([opened(0, WISHES[4]), *wishes])  # of two openings the later counts
        assert len(brought) == turn + 1
        for step in range(3):
            pair.step([*range(8)], logits_of(20 + step, 8))
    pair.device.open([])
    assert len(brought) == 2


def test_a_refused_opening_changes_no_row() -> None:
    pair = Pair()
    pair.open(opened(0, WISHES[3]))
    with pytest.raises(ValueError, match="row 1 was opened without a seed"):
        pair.device.open([opened(0, GREEDY), opened(1, SamplingParams())])
    pair.step([0], logits_of(0, 1))


def test_bans_end_on_the_device_when_enough_is_generated() -> None:
    pair = Pair()
    pair.open(opened(0, SamplingParams(temperature=0.0, min_new_tokens=2)))
    logits = torch.zeros(1, WIDE)
    logits[0, 40], logits[0, 5] = 3.0, 2.0
    assert [pair.step([0], logits)[0] for _ in range(4)] == [5, 5, 40, 40]


def test_a_failed_row_notes_nothing_and_its_neighbours_do_not_feel_it() -> None:
    pair = Pair()
    pair.open(opened(0, WISHES[3]))
    pair.open(opened(1, GREEDY))
    logits = logits_of(0, 2)
    broken = logits.clone()
    broken[0, 9] = math.nan
    assert pair.step([0, 1], broken)[0] == FAILED
    pair.step([0, 1], logits)


def test_a_grammar_allows_ids_by_row() -> None:
    sampler = DeviceSampler(3, VOCAB, torch.device("cpu"), chunk=16)
    sampler.open([opened(2, GREEDY)])
    allowed = torch.zeros(3, 2, dtype=torch.int32)
    allowed[2, 1] = 1 << (33 - 32)
    rows = torch.tensor([2], dtype=torch.int32)
    assert sampler.sample(logits_of(0, 1), rows, Needs(), allowed).tolist() == [33]


def test_what_a_step_needs_follows_from_its_rows() -> None:
    sampler = DeviceSampler(NUM_ROWS, VOCAB, torch.device("cpu"), chunk=16)
    for row, sampling in enumerate(WISHES):
        sampler.open([opened(row, sampling)])
    assert sampler.needs([]) == sampler.needs([0, 6]) == Needs()
    assert sampler.needs([0, 1]) == sampler.needs([7]) == Needs(draws=True)
    assert sampler.needs([2, 1, 6]) == Needs(draws=True, filters=True)
    for rows in ([3], [4], [5], [1, 4, 2]):
        assert sampler.needs(rows) == Needs(draws=True, filters=True, adjusts=True)
    # as many tokens as are asked for: what was banned no longer is
    sampler.open([opened(0, SamplingParams(temperature=0.0, min_new_tokens=2), output=[1, 1])])
    assert sampler.needs([0]) == Needs()


def test_warming_up_changes_nothing() -> None:
    pair = Pair()
    pair.open(opened(0, WISHES[3]))
    pair.device.warm_up(WIDE)
    pair.step([0], logits_of(0, 1))


def test_misuse_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = DeviceSampler(2, VOCAB, torch.device("cpu"), chunk=16)
    with pytest.raises(ValueError, match="row 1 was opened without a seed"):
        sampler.open([opened(1, SamplingParams())])
    with pytest.raises(ValueError, match="row 0 samples but was never opened"):
        sampler.needs([0])
    sampler.open([opened(0, GREEDY)])
    three = torch.tensor([0, -1, -1], dtype=torch.int32)
    with pytest.raises(ValueError, match="3 rows sample at once, the workspace is for 2"):
        sampler.sample(logits_of(0, 3), three, Needs())
    monkeypatch.setattr(device_sampler, "MAX_EDITS", 2)
    with pytest.raises(ValueError, match="row 0 has 1 biases and 2 bans, over 2"):
        sampler.open([opened(0, WISHES[5])])
