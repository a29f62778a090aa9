"""What the runner is told of rows: the columns of a step, and the sampler's view of a request."""

from array import array

import pytest

from tokenloom.scheduler_proc.core.lora_slots import LoRASlots
from tokenloom.scheduler_proc.core.radix_cache import RadixCache
from tokenloom.scheduler_proc.core.req import Req, ReqKV, ReqState
from tokenloom.scheduler_proc.core.schedule_batch import ScheduleBatch, row_open
from tokenloom.scheduler_proc.worker_batch import BatchResult, ForwardMode
from tokenloom.wire.messages import LoRALoaded, LoRARef
from tokenloom.wire.sampling import SamplingParams


def running(row: int, computed: int, prompt: list[int], answer: list[int], least: int = 0) -> Req:
    params = SamplingParams(min_new_tokens=least, seed=row)
    req = Req(row, 1, params, array("i", prompt + answer), len(prompt), 9, frozenset({5, 3}))
    req.kv = ReqKV(row, [1], 0, RadixCache(4).root, computed, landed=computed)
    req.state = ReqState.DECODING if answer else ReqState.EXTENDING
    return req


def test_the_sampler_starts_from_prompt_and_answer_so_far() -> None:
    entry = row_open(running(3, 0, [1, 2], [7, 8, 9]))
    assert (entry.row, entry.sampling.seed) == (3, 3)
    assert (list(entry.prompt_ids), list(entry.output_ids)) == ([1, 2], [7, 8, 9])
    assert entry.banned_ids == ()


def test_ids_that_would_end_an_answer_are_banned_where_it_has_a_least_length() -> None:
    assert row_open(running(0, 0, [1], [], least=2)).banned_ids == (3, 5)


def test_the_columns_of_a_step() -> None:
    """Only prompts bring their ids: the runner knows those that it has sampled."""
    decode = running(4, 3, [1, 2, 3], [7])
    inner, last = running(0, 1, [4, 5, 6, 7], []), running(2, 0, [8, 9], [])
    out = ScheduleBatch(6, [decode], [(inner, 2), (last, 2)]).launch([(2, 0, 9)], [], LoRASlots(0))
    assert (out.step, out.mode, out.num_decodes) == (6, ForwardMode.MIXED, 1)
    assert out.rows == [4, 0, 2]
    assert out.prefix_lens == [3, 1, 0]
    assert out.extend_lens == [1, 2, 2]
    assert out.samples == [True, False, True]
    assert list(out.input_ids) == [5, 6, 8, 9]
    assert out.new_pages == [(2, 0, 9)]
    assert out.lora_slots == out.new_loras == []


def test_what_is_launched_counts_as_computed() -> None:
    """Also for the next step, while the token that it starts from is not known."""
    req = running(0, 1, [4, 5, 6, 7], [])
    req.max_new_tokens = 2
    launched = []
    for decodes, extends in (([], [(req, 2)]), ([], [(req, 1)]), ([req], [])):
        out = ScheduleBatch(1, decodes, extends).launch([], [], LoRASlots(0))
        launched.append((out.prefix_lens, list(out.input_ids), out.samples, req.state))
    assert launched == [
        ([1], [5, 6], [False], ReqState.EXTENDING),
        ([3], [7], [True], ReqState.DECODING),
        ([4], [], [True], ReqState.DECODING),
    ]
    assert req.in_flight
    assert not req.goes_on_decoding, "two tokens are on their way"


@pytest.mark.parametrize(("sampled", "sound"), [(0, True), (1, True), (-1, False)])
def test_what_has_landed_is_sound_unless_the_model_failed(sampled: int, sound: bool) -> None:
    decode, last = running(1, 3, [1, 2, 3], [7]), running(2, 0, [8, 9], [])
    inner = running(0, 1, [4, 5, 6, 7], [])
    batch = ScheduleBatch(6, [decode], [(inner, 2), (last, 2)])
    batch.launch([], [], LoRASlots(0))
    assert batch.num_tokens == 5
    landed = list(batch.land(BatchResult(6, [sampled, sampled])))
    assert landed == [(decode, sampled), (inner, None), (last, sampled)]
    for req, tokens in ((decode, 4), (inner, 3), (last, 2)):
        assert req.kv is not None
        assert not req.in_flight
        assert req.kv.landed == tokens
        assert req.kv.sound == (sound or req is inner)


def test_rows_say_the_slots_of_their_adapters() -> None:
    slots = LoRASlots(2)
    for lora_id in (5, 6):
        slots.begin_load(LoRARef(lora_id, "a", "/x"))
        slots.end_load(LoRALoaded(lora_id, ok=True))
        slots.accept(lora_id)
        slots.admit(lora_id)
    reqs = [running(0, 0, [1], []), running(1, 0, [1], []), running(2, 0, [1], [])]
    reqs[0].lora_id, reqs[2].lora_id = 6, 5
    out = ScheduleBatch(1, [], [(req, 1) for req in reqs]).launch([], [], slots)
    assert out.lora_slots == [2, 0, 1]
    assert out.new_loras == [(1, 5), (2, 6)]
    assert slots.take_writes() == []


def test_the_mode_says_whether_rows_decode_extend_or_both() -> None:
    one, other = running(0, 3, [1, 2, 3], [7]), running(1, 3, [1, 2, 3], [7])
    steps = [([], [(one, 1), (other, 1)]), ([one], [(other, 1)]), ([one, other], [])]
    modes = [ScheduleBatch(1, decodes, extends).mode for decodes, extends in steps]
    assert modes == [ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.DECODE]
