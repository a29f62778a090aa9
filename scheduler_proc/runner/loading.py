"""From the configuration to a ModelRunner: threads, device, mode, the model and its vocabulary.

Called once, by the scheduler process at start-up.
"""

import logging
from collections import Counter
from dataclasses import dataclass

import torch

from ...kernels.cpu.native import NativeMissing
from ...kernels.cpu.native import load as load_native
from ...kernels.decoder import cache_width, check_page_size
from ...model_files.errors import ModelError
from ...model_files.gguf_file import open_gguf
from ...model_files.tokenizer import tokenizer_size
from ...wire.config import ExecutionConfig, ModelConfig, SchedulingConfig
from ...wire.lora_config import LoRAConfig
from ..models.config import ModelSpec
from ..models.llama import LlamaForCausalLM
from ..models.loader import load_model, load_packed_model
from ..models.packed import PackedLlama
from .host import cores_to_pin, physical_cores
from .kv_pool import KVShape
from .lora_loader import load_adapter
from .model_runner import LoadedModel, ModelRunner

logger = logging.getLogger(__name__)

_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NO_ADAPTERS = LoRAConfig()
_KV_DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "int8": torch.int8}
_FOUR_BITS = ("Q4_0", "Q4_1")
_DEVICE = "cpu"  # the only one so far: what `auto` finds


@dataclass(slots=True, frozen=True)
class _Source:
    """Where the model comes from, and in which mode it is to run."""

    path: str
    config: ModelConfig
    mode: str
    kv_dtype: torch.dtype
    threads: int
    max_lora_rank: int


def make_model_runner(
    model: ModelConfig,
    scheduling: SchedulingConfig,
    execution: ExecutionConfig,
    lora: LoRAConfig = NO_ADAPTERS,
) -> ModelRunner:
    """`model.model` is a local path by now. Raises ModelError with the reason and what to do."""
    if model.model is None:
        raise ModelError("no model was given: the launcher resolves the default to a path")
    threads = execution.cpu_threads or physical_cores()
    torch.set_num_threads(threads)
    mode = choose_mode(execution, model.model, scheduling.page_size)
    kv_dtype = choose_kv_dtype(execution.kv_cache_dtype, mode)
    loaded = _load(_Source(model.model, model, mode, kv_dtype, threads, lora.max_lora_rank))
    runner = ModelRunner(loaded, scheduling, execution, lora.max_loras_per_batch)
    logger.info(
        "running on %s in %s with %s KV and %d threads",
        _DEVICE,
        mode,
        str(kv_dtype).removeprefix("torch."),
        threads,
    )
    return runner


def choose_mode(execution: ExecutionConfig, path: str, page_size: int) -> str:
    """Resolves `auto`, and refuses what cannot run here. Raises ModelError."""
    asked = execution.dtype
    if asked in _FLOATS:
        return asked
    try:
        load_native()
        check_page_size(page_size, _KV_DTYPES[execution.kv_cache_dtype])
    except (NativeMissing, ValueError) as error:
        if asked != "auto":
            raise ModelError(f"--dtype {asked} is not possible: {error}") from error
        logger.warning("running in float32, which is slower than int8: %s", error)
        return "float32"
    if asked != "auto":
        return asked
    return "int4" if path.endswith(".gguf") and _mostly_four_bits(path) else "int8"


def choose_kv_dtype(asked: str, mode: str) -> torch.dtype:
    """Raises ModelError. A float mode keeps keys and values as it computes them."""
    if mode in _FLOATS:
        if asked not in ("auto", mode):
            raise ModelError(
                f"--kv-cache-dtype {asked} is not possible with --dtype {mode}, which keeps keys "
                f"and values in {mode}: only int8 and int4 have a choice"
            )
        return _FLOATS[mode]
    return _KV_DTYPES[asked]


def _mostly_four_bits(path: str) -> bool:
    elements: Counter[bool] = Counter()
    for tensor in open_gguf(path).tensors:
        elements[tensor.tensor_type.name in _FOUR_BITS] += int(tensor.n_elements)
    return elements[True] > elements[False]


def _load(source: _Source) -> LoadedModel:
    model: LlamaForCausalLM | PackedLlama
    model, spec = _load_float(source) if source.mode in _FLOATS else _load_packed(source)
    packed = source.mode not in _FLOATS
    return LoadedModel(
        model=model,
        kv_shape=KVShape(
            spec.num_layers,
            spec.num_kv_heads,
            cache_width(spec.head_dim, source.kv_dtype) if packed else spec.head_dim,
            source.kv_dtype,
        ),
        context_length=spec.context_length,
        # embeddings are often padded to a round number beyond what the tokenizer knows
        vocab_size=min(spec.vocab_size, tokenizer_size(source.path)),
        dtype_name=source.mode,
        # the front has resolved and allowed the path
        read_adapter=lambda path: model.resident(
            load_adapter(path, spec, [path], source.max_lora_rank)
        ),
    )


def _load_float(source: _Source) -> tuple[LlamaForCausalLM, ModelSpec]:
    model = load_model(
        source.path,
        dtype=_FLOATS[source.mode],
        device=_DEVICE,
        load_format=source.config.load_format,
        context_length=source.config.context_length,
    )
    return model, model.spec


def _load_packed(source: _Source) -> tuple[PackedLlama, ModelSpec]:
    model = load_packed_model(
        source.path,
        "int4" if source.mode == "int4" else "int8",
        load_format=source.config.load_format,
        context_length=source.config.context_length,
        threads=source.threads,
    )
    model.pin(cores_to_pin(source.threads))
    return model, model.spec
