"""A model without floating point: the next id is a hash of the ids found in the slots it reads.

A wrong, stale, foreign or missing KV page shows up as a wrong token at once. `HashRunner` stands in
for the model runner; `hash_answer` says what a request must get, whatever shares the pool with it.
"""

import zlib
from array import array
from collections.abc import Sequence

from tokenloom.scheduler_proc.worker_batch import BatchResult, ForwardMode, ModelWorkerBatch

VOCAB = 97
EOS = 0


def next_id(ids: Sequence[int]) -> int:
    """Deterministic, depends on every id and on its place; EOS about once in 97."""
    return zlib.crc32(array("i", ids).tobytes()) % VOCAB


def hash_answer(prompt: Sequence[int], max_new_tokens: int, stop_ids: frozenset[int]) -> list[int]:
    ids, answer = list(prompt), []
    while len(answer) < max_new_tokens:
        answer.append(next_id(ids))
        ids.append(answer[-1])
        if answer[-1] in stop_ids:
            break
    return answer


class HashRunner:
    """Keeps a page table and one id per KV slot, and distrusts every batch it is given."""

    def __init__(self, *, num_pages: int, page_size: int, num_rows: int, budget: int) -> None:
        self.page_size = page_size
        self.budget = budget
        self.slots: list[int | None] = [None] * (num_pages * page_size)
        self.table: dict[int, dict[int, int]] = {row: {} for row in range(num_rows)}
        self.opened: set[int] = set()
        self.steps = 0
        self.fail_rows: set[int] = set()  # rows whose next sample is reported as broken

    def run(self, batch: ModelWorkerBatch) -> BatchResult:
        self.steps += 1
        assert len(set(batch.rows)) == len(batch.rows), "a row twice in a batch"
        assert all(count >= 1 for count in batch.extend_lens)
        assert sum(batch.extend_lens) == len(batch.input_ids)
        self._check_mode(batch)
        for row, index, page in batch.new_pages:
            assert page != 0, "the padding page was handed out"
            self.table[row][index] = page
        self.opened.update(entry.row for entry in batch.opened)
        assert self.opened.issuperset(batch.rows)
        self._write(batch)
        return BatchResult(batch.step, [self._sample(batch, i) for i in self._sampling(batch)])

    def _write(self, batch: ModelWorkerBatch) -> None:
        """All writes of a step come before all reads, as in a layer of the real model."""
        written: set[int] = set()
        ids = iter(batch.input_ids)
        for row, start, count in zip(batch.rows, batch.prefix_lens, batch.extend_lens, strict=True):
            for position in range(start, start + count):
                slot = self._slot(row, position)
                assert slot not in written, "two rows write one slot"
                written.add(slot)
                self.slots[slot] = next(ids)

    def _sample(self, batch: ModelWorkerBatch, i: int) -> int:
        row, end = batch.rows[i], batch.prefix_lens[i] + batch.extend_lens[i]
        if row in self.fail_rows:
            self.fail_rows.discard(row)
            return -1
        ids = [self.slots[self._slot(row, position)] for position in range(end)]
        assert None not in ids, "a slot was read that nobody wrote"
        return next_id([i for i in ids if i is not None])

    def _slot(self, row: int, position: int) -> int:
        page = self.table[row][position // self.page_size]
        return page * self.page_size + position % self.page_size

    @staticmethod
    def _sampling(batch: ModelWorkerBatch) -> list[int]:
        return [i for i, samples in enumerate(batch.samples) if samples]

    def _check_mode(self, batch: ModelWorkerBatch) -> None:
        extends = sum(batch.extend_lens[batch.num_decodes :])
        assert extends <= self.budget, "more prompt tokens than the step's budget"
        assert all(batch.samples[: batch.num_decodes])
        assert set(batch.extend_lens[: batch.num_decodes]) <= {1}
        assert (batch.mode is ForwardMode.DECODE) == (batch.num_decodes == len(batch.rows))
        assert (batch.mode is ForwardMode.EXTEND) == (batch.num_decodes == 0)
