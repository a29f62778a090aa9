"""A model without floating point: the next id is a hash of the KV slots that it reads. PURE.

The KV of a token is a hash of its id, of the adapter and of the KV before it, as in a real model,
and a sample reads all of them: a wrong, stale, foreign or missing page, or an adapter's wrong slot,
shows up as a wrong token at once.
`HashRunner` stands in for the model runner; `hash_answer` says what a request must get, whatever
shares the pool with it. Used by `driver`, and by the tests of core and runner.
"""

import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ...scheduler_proc.worker_batch import BatchResult, ForwardMode, LoRAOrders, ModelWorkerBatch
from ...wire.messages import LoRALoaded, LoRARef

VOCAB = 97
EOS = 0
_MIX = 0x9E37  # spreads the bits of a lora_id
_ID_BYTES = [number.to_bytes(4, sys.byteorder) for number in range(VOCAB)]


@dataclass(slots=True, frozen=True)
class Script:
    """Settings of a request in the hash model, found by the request's seed."""

    salt: int = 0  # only requests of equal salt may share KV
    ends_at: int | None = None  # length of prompt and answer, ended by EOS; None: the hash says
    lora_id: int = 0  # what the answer must come from; the runner itself reads slots


PLAIN = Script()


class Reader:
    """Hash state of a sample; KV states are fed in by position."""

    __slots__ = ("_lora_id", "crc", "state")

    def __init__(self, ids: Iterable[int], salt: int = 0, lora_id: int = 0) -> None:
        self._lora_id = lora_id
        self.state = salt
        self.crc = 0
        for token_id in ids:
            self.read(token_id)

    def read(self, token_id: int) -> None:
        self.state = _next_state(self.state, token_id, self._lora_id)
        self.crc = zlib.crc32(self.state.to_bytes(4, sys.byteorder), self.crc)


def _next_state(state: int, token_id: int, lora_id: int) -> int:
    return zlib.crc32(_ID_BYTES[token_id], state ^ lora_id * _MIX) or 1  # 0 is what nobody wrote


def _sample(crc: int, length: int, script: Script) -> int:
    """EOS about once in 97, or where the script wants it."""
    if script.ends_at is None:
        return crc % VOCAB
    return EOS if length + 1 >= script.ends_at else crc % (VOCAB - 1) + 1


def next_id(ids: Iterable[int], salt: int = 0) -> int:
    """Hash ids, their positions and the salt to the next id."""
    return Reader(ids, salt).crc % VOCAB


def hash_ids(prompt: Sequence[int], script: Script = PLAIN) -> Iterator[int]:
    """Yield the endless answer of a request alone."""
    reader, length = Reader(prompt, script.salt, script.lora_id), len(prompt)
    while True:
        token_id = _sample(reader.crc, length, script)
        yield token_id
        reader.read(token_id)
        length += 1


def hash_answer(
    prompt: Sequence[int],
    max_new_tokens: int,
    stop_ids: frozenset[int],
    script: Script = PLAIN,
) -> list[int]:
    answer: list[int] = []
    for token_id in hash_ids(prompt, script):
        if len(answer) == max_new_tokens:
            break
        answer.append(token_id)
        if token_id in stop_ids:
            break
    return answer


class HashAdapters:
    """Fake of LoRAMemoryPool; a load whose path is in `broken` fails."""

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.present: set[int] = set()
        self.slots: dict[int, int] = {0: 0}  # slot -> lora_id
        self._reading: list[LoRARef] = []

    @property
    def loading(self) -> bool:
        return bool(self._reading)

    def follow(self, orders: LoRAOrders) -> None:
        self._reading += orders.loads
        for lora_id in orders.drops:
            self.present.remove(lora_id)

    def take_loaded(self, most: int | None = None) -> list[LoRALoaded]:
        """Return the results of all loads, or of the first `most`."""
        read = self._reading[:most]
        del self._reading[:most]
        fine = [ref.path not in self.broken for ref in read]
        self.present |= {ref.lora_id for ref, ok in zip(read, fine, strict=True) if ok}
        return [LoRALoaded(ref.lora_id, ok=ok) for ref, ok in zip(read, fine, strict=True)]

    def write(self, entries: list[tuple[int, int]]) -> None:
        for slot, lora_id in entries:
            assert slot > 0, "the base model's slot was written"
            assert lora_id == 0 or lora_id in self.present, "a slot of an adapter that is not there"
            self.slots[slot] = lora_id


class HashRunner:
    """Fake runner with a page table and one KV state per slot; checks every batch.

    Fill `scripts` by seed; each row in `fail_rows` gets one broken sample.
    """

    def __init__(self, *, num_pages: int, page_size: int, num_rows: int, budget: int) -> None:
        self.page_size = page_size
        self.budget = budget
        self.scripts: dict[int, Script] = {}
        self.table: list[list[int]] = [[] for _ in range(num_rows)]
        self.last_ids = [0] * num_rows  # sampled
        self.seeds: dict[int, int] = {}  # of the rows opened so far
        self.steps = 0
        self.fail_rows: set[int] = set()
        self.loras = HashAdapters()
        self.slots = array("I", bytes(4 * num_pages * page_size))
        self._memory = memoryview(self.slots).cast("B")

    def prepare(self) -> bool:
        return False

    def launch(self, batch: ModelWorkerBatch) -> "LateResult":
        """Steps launched together must be read in their order."""
        return LateResult(self, batch)

    def run(self, batch: ModelWorkerBatch) -> BatchResult:
        self.steps += 1
        assert batch.step == self.steps, "a step is missing, or read out of turn"
        self._check(batch)
        for entry in batch.opened:
            assert entry.sampling.seed is not None
            self.seeds[entry.row] = entry.sampling.seed
            self.table[entry.row].clear()
        for row, index, page in batch.new_pages:
            self._map(row, index, page)
        self.loras.write(batch.new_loras)
        self._write(batch)
        next_ids = []
        for row, start, count, samples in zip(
            batch.rows, batch.prefix_lens, batch.extend_lens, batch.samples, strict=True
        ):
            if samples:
                next_ids.append(self._sample(row, start + count))
                self.last_ids[row] = max(0, next_ids[-1])
        return BatchResult(batch.step, next_ids)

    def _map(self, row: int, index: int, page: int) -> None:
        assert page != 0, "the padding page was handed out"
        table = self.table[row]
        if index < len(table):
            table[index] = page
        else:  # entries of an earlier holder of the row may leave a gap: nobody wrote page 0
            table += [0] * (index - len(table))
            table.append(page)

    def _write(self, batch: ModelWorkerBatch) -> None:
        """Write all KV of a step before any is read, as a layer of a real model does."""
        size, slots, written, done = self.page_size, self.slots, 0, set()
        ids = [self.last_ids[row] for row in batch.rows[: batch.num_decodes]]
        ids += batch.input_ids
        loras = [self.loras.slots[slot] for slot in batch.lora_slots or [0] * len(batch.rows)]
        for row, start, count, lora_id in zip(
            batch.rows, batch.prefix_lens, batch.extend_lens, loras, strict=True
        ):
            table = self.table[row]
            state = self._state_before(row, start)
            for position in range(start, start + count):
                slot = table[position // size] * size + position % size
                state = _next_state(state, ids[written], lora_id)
                slots[slot] = state
                done.add(slot)
                written += 1
        assert len(done) == written, "two rows write one slot"

    def _state_before(self, row: int, position: int) -> int:
        if position == 0:
            return self._script(row).salt
        before = position - 1
        page = self.table[row][before // self.page_size]
        state = self.slots[page * self.page_size + before % self.page_size]
        assert state, "a slot was read that nobody wrote"
        return state

    def _sample(self, row: int, end: int) -> int:
        page_bytes, memory, crc = 4 * self.page_size, self._memory, 0
        whole, rest = divmod(end, self.page_size)
        table = self.table[row]
        if row in self.fail_rows:
            self.fail_rows.discard(row)
            page, at = divmod(end - 1, self.page_size)
            self.slots[table[page] * self.page_size + at] ^= 1  # corrupts every reader
            return -1
        for page in table[:whole]:
            crc = zlib.crc32(memory[page * page_bytes : (page + 1) * page_bytes], crc)
        if rest:
            start = table[whole] * page_bytes
            crc = zlib.crc32(memory[start : start + 4 * rest], crc)
        return _sample(crc, end, self._script(row))

    def _script(self, row: int) -> Script:
        return self.scripts.get(self.seeds[row], PLAIN)

    def _check(self, batch: ModelWorkerBatch) -> None:
        decodes = batch.num_decodes
        assert len(set(batch.rows)) == len(batch.rows), "a row twice in a batch"
        assert all(count >= 1 for count in batch.extend_lens)
        assert sum(batch.extend_lens[decodes:]) == len(batch.input_ids)
        assert len(batch.input_ids) <= self.budget, "more prompt than the budget"
        assert all(batch.samples[:decodes])
        assert set(batch.extend_lens[:decodes]) <= {1}
        assert (batch.mode is ForwardMode.DECODE) == (decodes == len(batch.rows))
        assert (batch.mode is ForwardMode.EXTEND) == (decodes == 0)


@dataclass(slots=True, frozen=True)
class LateResult:
    """A launched step, computed when read, to show that later events do not change it."""

    runner: HashRunner
    batch: ModelWorkerBatch
    how: str = ""

    def result(self) -> BatchResult:
        return self.runner.run(self.batch)
