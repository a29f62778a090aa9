"""How long a step would take: linear in rows, prompt tokens and the context they read. PURE.

Most of a small step is reading the weights, which `step` holds; then each row reads the keys and
values of what stands before its new tokens.
"""

from dataclasses import dataclass

from ...scheduler_proc.worker_batch import ModelWorkerBatch


@dataclass(slots=True, frozen=True)
class StepTime:
    """Seconds. The defaults are the embedded model's on two cores (docs/measurements.md)."""

    step: float = 3e-3  # planning, reading the weights once, sampling
    row: float = 0.3e-3  # that decodes
    token: float = 0.22e-3  # of a prompt
    context_token: float = 0.9e-6  # reading one token's keys and values

    def __call__(self, batch: ModelWorkerBatch) -> float:
        context = sum(batch.prefix_lens) * self.context_token
        return (
            self.step + batch.num_decodes * self.row + len(batch.input_ids) * self.token + context
        )
