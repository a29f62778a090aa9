"""Make a runner from the configuration: choose threads, device and mode, load the model.

Called once, by the scheduler process at start-up.
"""

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Literal

import torch

from ...kernels.cpu.native import NativeMissing, instruction_set
from ...kernels.cpu.native import load as load_native
from ...kernels.decoder import cache_width, check_page_size
from ...model_files.errors import ModelError
from ...model_files.gguf_file import open_gguf
from ...model_files.tokenizer import tokenizer_size
from ...wire.config import ExecutionConfig, ModelConfig
from ...wire.lora_config import LoRAConfig
from ...wire.scheduling_config import SchedulingConfig
from ..models.config import ModelSpec
from ..models.llama import LlamaForCausalLM
from ..models.loader import load_model, load_packed_model
from ..models.packed import PackedLlama
from ..models.parallel import WHOLE, Shard
from .device import CudaDevice
from .device_lora import staged
from .facts import Runner
from .host import cores_to_pin, physical_cores
from .kv_pool import KVShape
from .lora_loader import load_adapter
from .model_runner import LoadedModel, ModelRunner

logger = logging.getLogger(__name__)

_FLOATS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NO_ADAPTERS = LoRAConfig()
_KV_DTYPES = {"auto": torch.bfloat16, "bfloat16": torch.bfloat16, "int8": torch.int8}
_FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
_FOUR_BITS = ("Q4_0", "Q4_1")
Device = Literal["cpu", "cuda"]


@dataclass(slots=True, frozen=True)
class _Source:
    """The model's path, and the device and mode in which to run it."""

    path: str
    config: ModelConfig
    device: Device
    mode: str
    kv_dtype: torch.dtype
    threads: int
    max_lora_rank: int
    shard: Shard


def make_model_runner(
    model: ModelConfig,
    scheduling: SchedulingConfig,
    execution: ExecutionConfig,
    lora: LoRAConfig = NO_ADAPTERS,
    shard: Shard = WHOLE,
) -> Runner:
    """`model.model` is a local path by now. Raises ModelError with the reason and what to do.

    Every rank must make the runner of its own `shard`: they wait for each other.
    """
    if model.model is None:
        raise ModelError("no model was given: the launcher resolves the default to a path")
    threads = execution.cpu_threads or max(1, physical_cores() // shard.size)
    torch.set_num_threads(threads)
    device = choose_device(execution.device)
    mode = choose_mode(execution, device, model.model, scheduling.page_size)
    kv_dtype = choose_kv_dtype(execution.kv_cache_dtype, device, mode)
    lora_rank = lora.max_lora_rank
    source = _Source(model.model, model, device, mode, kv_dtype, threads, lora_rank, shard)
    logger.info("%s", _where(source))
    if device == "cuda":
        # Slots cost memory and twice the graphs, so there are none where adapters are off.
        max_loras = lora.max_loras_per_batch if lora.enabled else 0
        return _on_cuda(source, scheduling, execution, max_loras)
    return ModelRunner(_load(source), scheduling, execution, lora.max_loras_per_batch)


def _where(source: _Source) -> str:
    """Describe what computes the steps, for the log."""
    if source.device == "cuda":
        what = f"CUDA device: {torch.cuda.get_device_name()}"
    elif source.mode in _FLOATS:
        what = f"CPU with torch in {source.mode}: {source.threads} threads"
    else:
        what = f"native library: {instruction_set()}, {source.threads} threads"
    return f"{what}; KV cache in {str(source.kv_dtype).removeprefix('torch.')}"


def choose_device(asked: str) -> Device:
    """Resolve `auto`. Raises ModelError if a CUDA device is asked for and there is none."""
    if asked == "cpu" or (asked == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if not torch.cuda.is_available():
        raise ModelError(
            f"--device {asked}: torch {torch.__version__} sees no CUDA device; install a driver "
            "and a CUDA build of torch, or use --device cpu"
        )
    return "cuda"


def choose_mode(execution: ExecutionConfig, device: Device, path: str, page_size: int) -> str:
    """Resolve `auto`. Raises ModelError for a mode that cannot run here."""
    mode = _choose_mode(execution, device, path, page_size)
    ranks = execution.tensor_parallel
    if ranks > 1 and mode not in _FLOATS:
        raise ModelError(
            f"--tp {ranks} does not share out {mode} weights (--dtype {execution.dtype}): it needs "
            "--dtype bfloat16 or float32"
        )
    return mode


def _choose_mode(execution: ExecutionConfig, device: Device, path: str, page_size: int) -> str:
    asked = execution.dtype
    if device == "cuda":
        if asked in ("int4", "int8"):
            raise ModelError(f"--dtype {asked} is for the CPU: a CUDA device computes in floats")
        return "bfloat16" if asked == "auto" else asked
    if asked == "float16":
        raise ModelError("--dtype float16 needs a CUDA device: a CPU has bfloat16 and float32")
    if asked in _FLOATS:
        return asked
    try:
        load_native()
        check_page_size(page_size, _KV_DTYPES.get(execution.kv_cache_dtype, torch.bfloat16))
    except (NativeMissing, ValueError) as error:
        if asked != "auto":
            raise ModelError(f"--dtype {asked} is not possible: {error}") from error
        logger.warning("running in float32 with torch, about five times slower: %s", error)
        return "float32"
    if asked != "auto":
        return asked
    return "int4" if path.endswith(".gguf") and _mostly_four_bits(path) else "int8"


def choose_kv_dtype(asked: str, device: Device, mode: str) -> torch.dtype:
    """Resolve `auto`, or raise ModelError. A float mode keeps keys and values in its own type, or
    in fp8 on a CUDA device.
    """
    if device == "cuda" and asked in _FP8:
        return _FP8[asked]
    if mode in _FLOATS:
        if asked not in ("auto", mode):
            raise ModelError(
                f"--kv-cache-dtype {asked} is not possible on {device} with --dtype {mode}, which "
                f"keeps keys and values in {mode}: int8 is for the int8 and int4 modes of a CPU, "
                "fp8 for CUDA devices"
            )
        return _FLOATS[mode]
    if asked in _FP8:
        raise ModelError(f"--kv-cache-dtype {asked} needs a CUDA device; the CPU has int8")
    return _KV_DTYPES[asked]


def _mostly_four_bits(path: str) -> bool:
    elements: Counter[bool] = Counter()
    for tensor in open_gguf(path).tensors:
        elements[tensor.tensor_type.name in _FOUR_BITS] += int(tensor.n_elements)
    return elements[True] > elements[False]


def _on_cuda(
    source: _Source, scheduling: SchedulingConfig, execution: ExecutionConfig, max_loras: int
) -> Runner:
    try:  # imported only here: a CPU needs no triton
        from .device_loading import DeviceSource, make_device_runner
    except ImportError as error:
        raise ModelError(
            f"a CUDA device needs triton ({error}): install tokenloom[triton], or use --device cpu"
        ) from error

    if source.kv_dtype in _FP8.values() and torch.cuda.get_device_capability() < (8, 9):
        raise ModelError("--kv-cache-dtype fp8 needs a device of compute capability 8.9 or later")
    device = CudaDevice(source.shard.rank)
    model, spec = _load_float(source, device.name)
    loaded = DeviceSource(
        model=model,
        kv_dtype=source.kv_dtype,
        vocab_size=_known_ids(source, spec),
        dtype_name=source.mode,
        read_adapter=lambda path: staged(
            load_adapter(path, spec, [path], source.max_lora_rank), model.dtype, pinned=True
        ),
        max_loras=max_loras,
        max_lora_rank=source.max_lora_rank,
    )
    return make_device_runner(device, loaded, scheduling, execution)


def _load(source: _Source) -> LoadedModel:
    model: LlamaForCausalLM | PackedLlama
    packed = source.mode not in _FLOATS
    model, spec = _load_packed(source) if packed else _load_float(source, "cpu")
    return LoadedModel(
        model=model,
        kv_shape=KVShape(
            spec.num_layers,
            spec.num_kv_heads,
            cache_width(spec.head_dim, source.kv_dtype) if packed else spec.head_dim,
            source.kv_dtype,
        ),
        context_length=spec.context_length,
        vocab_size=_known_ids(source, spec),
        dtype_name=source.mode,
        # the front has resolved and allowed the path
        read_adapter=lambda path: model.resident(
            load_adapter(path, spec, [path], source.max_lora_rank)
        ),
        shard=source.shard,
    )


def _known_ids(source: _Source, spec: ModelSpec) -> int:
    """Number of ids that the tokenizer knows: embeddings are often padded beyond it."""
    return min(spec.vocab_size, tokenizer_size(source.path))


def _load_float(source: _Source, device: str) -> tuple[LlamaForCausalLM, ModelSpec]:
    model = load_model(
        source.path,
        dtype=_FLOATS[source.mode],
        device=device,
        load_format=source.config.load_format,
        context_length=source.config.context_length,
        shard=source.shard,
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
