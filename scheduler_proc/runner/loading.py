"""From the configuration to a ModelRunner: threads, device, dtype, the model and its vocabulary.

Called once, by the scheduler process at start-up.
"""

import logging

import torch

from ...model_files.errors import ModelError
from ...model_files.tokenizer import tokenizer_size
from ...wire.config import ExecutionConfig, ModelConfig, SchedulingConfig
from ..models.loader import load_model
from .host import physical_cores
from .kv_pool import KVShape
from .model_runner import LoadedModel, ModelRunner

logger = logging.getLogger(__name__)

_DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}
_DEVICE = "cpu"  # the only one so far: what `auto` finds


def make_model_runner(
    model: ModelConfig, scheduling: SchedulingConfig, execution: ExecutionConfig
) -> ModelRunner:
    """`model.model` is a local path by now. Raises ModelError with the reason and what to do."""
    threads = execution.cpu_threads or physical_cores()
    torch.set_num_threads(threads)
    loaded = _load(model, _DTYPES[execution.dtype])
    runner = ModelRunner(loaded, scheduling, execution)
    logger.info("running on %s in %s with %d threads", _DEVICE, runner.dtype_name, threads)
    return runner


def _load(config: ModelConfig, dtype: torch.dtype) -> LoadedModel:
    if config.model is None:
        raise ModelError("no model was given: the launcher resolves the default to a path")
    model = load_model(
        config.model,
        dtype=dtype,
        device=_DEVICE,
        load_format=config.load_format,
        context_length=config.context_length,
    )
    spec = model.spec
    return LoadedModel(
        model=model,
        kv_shape=KVShape(spec.num_layers, spec.num_kv_heads, spec.head_dim, dtype),
        context_length=spec.context_length,
        # embeddings are often padded to a round number beyond what the tokenizer knows
        vocab_size=min(spec.vocab_size, tokenizer_size(config.model)),
    )
