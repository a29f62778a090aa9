"""How long a step would take: a linear roofline over tokens, rows and context. PURE.

A step reads all weights once or computes its tokens, whichever is longer; then each row reads the
keys and values of what stands before its new tokens.
"""

from dataclasses import dataclass

from ...scheduler_proc.worker_batch import ModelWorkerBatch


@dataclass(slots=True, frozen=True)
class StepTime:
    """Seconds. The defaults are of the size of a 135M model on two cores."""

    step: float = 0.5e-3  # planning, launching, sampling
    weights: float = 12e-3  # reading them once
    token: float = 2e-3  # computing one
    row: float = 0.1e-3
    context_token: float = 1e-6  # reading one token's keys and values

    def __call__(self, batch: ModelWorkerBatch) -> float:
        compute = max(self.weights, len(batch.input_ids) * self.token)
        context = sum(batch.prefix_lens) * self.context_token
        return self.step + compute + len(batch.rows) * self.row + context
