"""ScheduleBatch: the rows of one step, and the columns that the runner gets of them. PURE.

Built by core/scheduler.py, decodes first; kept until the step's result has come back.
"""

from array import array
from dataclasses import dataclass

from ..worker_batch import ForwardMode, ModelWorkerBatch, RowOpen
from .lora_slots import LoRASlots
from .req import Req


@dataclass(slots=True, frozen=True)
class ScheduleBatch:
    """`tokens[i]` of `reqs[i]` are computed; the first `num_decodes` rows are decodes."""

    step: int
    reqs: list[Req]
    tokens: list[int]
    num_decodes: int

    @property
    def mode(self) -> ForwardMode:
        if self.num_decodes == len(self.reqs):
            return ForwardMode.DECODE
        return ForwardMode.MIXED if self.num_decodes else ForwardMode.EXTEND

    def for_worker(
        self,
        new_pages: list[tuple[int, int, int]],
        opened: list[RowOpen],
        loras: LoRASlots,
    ) -> ModelWorkerBatch:
        rows, prefix_lens, samples = [], [], []
        input_ids = array("i")
        for req, count in zip(self.reqs, self.tokens, strict=True):
            kv = req.kv
            assert kv is not None
            end = kv.computed + count
            rows.append(kv.row)
            prefix_lens.append(kv.computed)
            samples.append(end == len(req.ids))
            input_ids += req.ids[kv.computed : end]
        return ModelWorkerBatch(
            step=self.step,
            mode=self.mode,
            num_decodes=self.num_decodes,
            rows=rows,
            prefix_lens=prefix_lens,
            extend_lens=list(self.tokens),
            samples=samples,
            input_ids=input_ids,
            new_pages=new_pages,
            opened=opened,
            lora_slots=self._lora_slots(loras),
            new_loras=loras.take_writes(),
        )

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
