"""ScheduleBatch: the requests of one step, and the ModelWorkerBatch made of them. PURE.

Built by core/scheduler.py, decodes first; kept until the step's result has come back.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from ..worker_batch import BatchResult, ForwardMode, ModelWorkerBatch, RowOpen
from .lora_slots import LoRASlots
from .req import Req, ReqState


@dataclass(slots=True, frozen=True)
class ScheduleBatch:
    """A step computes one token of each of `decodes`, and the given number of each of `extends`."""

    step: int
    decodes: list[Req]
    extends: list[tuple[Req, int]]

    @property
    def reqs(self) -> list[Req]:
        return self.decodes + [req for req, _ in self.extends]

    @property
    def mode(self) -> ForwardMode:
        if not self.extends:
            return ForwardMode.DECODE
        return ForwardMode.MIXED if self.decodes else ForwardMode.EXTEND

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(tokens for _, tokens in self.extends)

    def launch(
        self,
        new_pages: list[tuple[int, int, int]],
        opened: list[RowOpen],
        loras: LoRASlots,
    ) -> ModelWorkerBatch:
        """Make the batch for the runner and count its tokens as computed."""
        rows, prefix_lens = [], []
        extend_lens, samples = [1] * len(self.decodes), [True] * len(self.decodes)
        for req in self.decodes:
            kv = req.kv
            assert kv is not None
            rows.append(kv.row)
            prefix_lens.append(kv.computed)
            kv.computed += 1
        input_ids = array("i")
        for req, tokens in self.extends:
            kv = req.kv
            assert kv is not None
            rows.append(kv.row)
            prefix_lens.append(kv.computed)
            extend_lens.append(tokens)
            input_ids += req.ids[kv.computed : kv.computed + tokens]
            kv.computed += tokens
            samples.append(kv.computed == len(req.ids))
            if samples[-1]:
                req.move(ReqState.DECODING, "all of its prompt is launched")
        return ModelWorkerBatch(
            step=self.step,
            mode=self.mode,
            num_decodes=len(self.decodes),
            rows=rows,
            prefix_lens=prefix_lens,
            extend_lens=extend_lens,
            samples=samples,
            input_ids=input_ids,
            new_pages=new_pages,
            opened=opened,
            lora_slots=self._lora_slots(loras),
            new_loras=loras.take_writes(),
        )

    def land(self, result: BatchResult) -> Iterator[tuple[Req, int | None]]:
        """Count the tokens as landed; yield each request with its sampled id, None in a prompt."""
        sampled = iter(result.next_ids)
        for req in self.decodes:
            token_id = next(sampled)
            kv = req.kv
            assert kv is not None
            kv.landed += 1
            kv.sound &= token_id >= 0
            yield req, token_id
        for req, tokens in self.extends:
            kv = req.kv
            assert kv is not None
            kv.landed += tokens
            sample = next(sampled) if kv.landed == len(req.ids) else None
            kv.sound &= sample is None or sample >= 0
            yield req, sample

    def _lora_slots(self, loras: LoRASlots) -> list[int]:
        if not any(req.lora_id for req in self.reqs):
            return []
        return [loras.slot_of(req.lora_id) for req in self.reqs]


def row_open(req: Req) -> RowOpen:
    """The sampler's view of a request that has just been given a row."""
    kv = req.kv
    assert kv is not None
    return RowOpen(
        row=kv.row,
        sampling=req.sampling,
        prompt_ids=req.ids[: req.prompt_len],
        output_ids=req.ids[req.prompt_len :],
        banned_ids=tuple(sorted(req.stop_ids)) if req.sampling.min_new_tokens else (),
    )
