"""StepNumbers: the columns of a batch as arrays, and the row and position of each new token.

Made once per step by either runner.
"""

import numpy as np
from numpy.typing import NDArray

from ..worker_batch import ModelWorkerBatch

Ints = NDArray[np.int64]


class StepNumbers:
    """`ends[i]`: end of request i's tokens among all T of the step. int64; sampling bool."""

    def __init__(self, batch: ModelWorkerBatch) -> None:
        self.rows, self.prefix_lens, self.extend_lens = (
            np.array(column, dtype=np.int64)
            for column in (batch.rows, batch.prefix_lens, batch.extend_lens)
        )
        self.ends: Ints = self.extend_lens.cumsum()
        starts = self.ends - self.extend_lens
        self.token_rows: Ints = np.repeat(self.rows, self.extend_lens)
        # prefix_len + 0, 1, ... for each request
        self.positions: Ints = np.repeat(self.prefix_lens - starts, self.extend_lens)
        self.positions += np.arange(self.ends[-1], dtype=np.int64)
        self.sampling = np.array(batch.samples, dtype=np.bool_)
