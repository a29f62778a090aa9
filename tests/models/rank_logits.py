"""What test_parallel.py has each rank do: `python rank_logits.py RANK SIZE DIRECTORY`.

Every checkpoint below the directory is loaded and run; its logits go into logits<RANK>.npy there.
"""

import os
import sys
from pathlib import Path

import numpy as np
import torch

from tokenloom.scheduler_proc.models.forward_batch import ForwardBatch
from tokenloom.scheduler_proc.models.llama import LlamaForCausalLM
from tokenloom.scheduler_proc.models.loader import LoadFormat, load_model
from tokenloom.scheduler_proc.models.parallel import WHOLE, Shard
from tokenloom.scheduler_proc.runner.rank_group import join
from tokenloom.scheduler_proc.worker_batch import ForwardMode
from tokenloom.wire.config import ExecutionConfig

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 35, 89, 79, 32, 38, 46]
PIECES = (11, 3, 1)  # a chunk, another one over its cache, a decode
PAGE = 1


def loaded(path: Path, shard: Shard = WHOLE) -> LlamaForCausalLM:
    """A directory named dummy... gets made-up weights; one that holds a GGUF file, the file."""
    load_format: LoadFormat = "dummy" if path.name.startswith("dummy") else "auto"
    file = next(path.glob("*.gguf"), path)
    return load_model(
        str(file),
        dtype=torch.float32,
        device="cpu",
        load_format=load_format,
        context_length=None,
        shard=shard,
    )


def logits_of(model: LlamaForCausalLM) -> np.ndarray:
    """[len(PROMPT), vocab] of the prompt, computed in pieces."""
    spec = model.spec
    shape = (len(PROMPT) + PAGE, spec.num_kv_heads, spec.head_dim)
    caches = [[torch.zeros(shape) for _ in range(spec.num_layers)] for _ in "kv"]
    found, start = [], 0
    for length in PIECES:
        end = start + length
        slots = torch.arange(end) + PAGE
        batch = ForwardBatch(
            mode=ForwardMode.EXTEND,
            input_ids=torch.tensor(PROMPT[start:end]),
            positions=torch.arange(start, end),
            out_cache_loc=slots[start:],
            rows=[0],
            page_table=slots[None].int(),
            page_size=PAGE,
            extend_lens=[length],
            prefix_lens=[start],
            request_slots=[slots],
            logit_indices=torch.arange(length),
            k_cache=caches[0],
            v_cache=caches[1],
        )
        found.append(model.forward(batch).numpy())
        start = end
    return np.concatenate(found)


def main(rank: int, size: int, directory: Path) -> None:
    torch.set_num_threads(1)
    shard = join(rank, str(directory), ExecutionConfig(device="cpu", tensor_parallel=size))
    for path in sorted(one for one in directory.iterdir() if one.is_dir()):
        np.save(path / f"logits{rank}.npy", logits_of(loaded(path, shard)))
    os._exit(0)  # as the processes of a server end: torch's threads do not survive its own teardown


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
