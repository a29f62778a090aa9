"""The process group in which the ranks of one model reduce and gather, on one machine.

Called once by each rank's process, before it loads. The ranks meet through a file in the server's
own directory; their traffic stays on the loopback interface or between the devices.
"""

import os
import sys

import torch
import torch.distributed as dist

from ...model_files.errors import ModelError
from ...wire.config import ExecutionConfig
from ..models.parallel import WHOLE, Shard
from .loading import choose_device

_LOOPBACK = {"linux": "lo", "darwin": "lo0"}


def join(rank: int, run_dir: str, execution: ExecutionConfig) -> Shard:
    """Block until all ranks have joined. Raises ModelError for more ranks than CUDA devices."""
    size = execution.tensor_parallel
    if size == 1:
        return WHOLE
    on_cuda = choose_device(execution.device) == "cuda"
    if on_cuda and (devices := torch.cuda.device_count()) < size:
        raise ModelError(f"--tp {size} needs {size} CUDA devices, of which {devices} are here")
    if sys.platform in _LOOPBACK:
        for library in ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", _LOOPBACK[sys.platform])
    if on_cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
        store=dist.FileStore(f"{run_dir}/ranks", size),  # type: ignore[attr-defined]
        rank=rank,
        world_size=size,
    )
    return Shard(rank, size)
