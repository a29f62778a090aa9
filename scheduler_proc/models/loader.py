"""Loads a model from a local path. Called once by the runner; must not download or run it."""

import logging
import math
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from ...kernels.quantised_linear import Kind, release_memory
from ...model_files.config import read_config
from ...model_files.errors import ModelError, names_the_file
from .checkpoint import Checkpoint, Progress, check_tensors, fill_model
from .config import ModelSpec, parse_spec
from .dummy_weights import DummyCheckpoint, fill_dummy
from .gguf_weights import GgufCheckpoint
from .llama import LlamaForCausalLM
from .packed import PackedLlama, pack_model
from .parallel import WHOLE, Shard
from .registry import MODELS
from .weights import SafetensorsCheckpoint

log = logging.getLogger(__name__)
LoadFormat = Literal["auto", "dummy"]


@names_the_file
def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: str,
    load_format: LoadFormat,
    context_length: int | None,
    shard: Shard = WHOLE,
) -> LlamaForCausalLM:
    """Load a directory or .gguf file with its weights in `dtype` on `device`.

    `dummy` reads only the config and draws seeded random weights. `context_length` in tokens lowers
    the model's own limit. Each rank reads its `shard`. Raises ModelError.
    """
    spec = _read_spec(path, context_length)
    checkpoint = _open(path, spec, load_format)
    started = time.perf_counter()
    mode = str(dtype).removeprefix("torch.")
    _log_start(path, spec, mode)
    model = MODELS[spec.architecture](spec, dtype, device, shard)
    with _bar(sum(slot.numel() for slot in model.weight_slots.values())) as progress:
        if load_format == "dummy":
            fill_dummy(model)
        else:
            fill_model(model, checkpoint, progress)
    nbytes = sum(slot.nbytes for slot in model.weight_slots.values())
    model.finish()
    _log_end(nbytes, mode, started)
    return model


@names_the_file
def load_packed_model(
    path: str,
    kind: Kind,
    *,
    load_format: LoadFormat,
    context_length: int | None,
    threads: int,
) -> PackedLlama:
    """Load a model with packed weights for the native CPU library (kernels/quantised_linear.py).

    GGUF tensors that a packed format suitable for `kind` holds exactly are not quantised again.
    Raises ModelError, and NativeMissing without the native library.
    """
    spec = _read_spec(path, context_length)
    checkpoint = _open(path, spec, load_format)
    started = time.perf_counter()
    _log_start(path, spec, kind)
    with _bar(sum(math.prod(checkpoint.shape(name)) for name in checkpoint.names)) as progress:
        packed = pack_model(spec, checkpoint, kind, threads, progress)
    release_memory()
    _log_end(packed.nbytes, kind, started)
    return packed


def _open(path: str, spec: ModelSpec, load_format: LoadFormat) -> Checkpoint:
    """Open the files and check them against the config, before weights are allocated."""
    skeleton = MODELS[spec.architecture](spec, torch.float32, "meta")
    shapes = {name: list(slot.shape) for name, slot in skeleton.weight_slots.items()}
    checkpoint: Checkpoint
    if load_format == "dummy":
        checkpoint = DummyCheckpoint(shapes)
    elif path.endswith(".gguf"):
        checkpoint = GgufCheckpoint(path, spec)
    else:
        checkpoint = SafetensorsCheckpoint(Path(path), tied=spec.tied)
    check_tensors(shapes, checkpoint)
    return checkpoint


def _read_spec(path: str, context_length: int | None) -> ModelSpec:
    return limit_context(parse_spec(read_config(path)), context_length)


def limit_context(spec: ModelSpec, context_length: int | None) -> ModelSpec:
    if context_length is None:
        return spec
    if context_length > spec.context_length:
        raise ModelError(
            f"context length {context_length} is above the model's own {spec.context_length}"
        )
    return replace(spec, context_length=context_length)


@contextmanager
def _bar(num_weights: int) -> Iterator[Progress]:
    """Show a progress bar on a terminal only; a log gets one line before and one after."""
    with tqdm(
        total=num_weights,
        unit="weights",
        unit_scale=True,
        desc="loading",
        leave=False,
        disable=not sys.stderr.isatty(),
    ) as bar:
        yield bar.update


def _log_start(path: str, spec: ModelSpec, mode: str) -> None:
    log.info("loading %s (%s) in %s", path, spec.architecture, mode)


def _log_end(num_bytes: int, mode: str, started: float) -> None:
    seconds = time.perf_counter() - started
    log.info("loaded in %.1f s: %.0f MB of weights in %s", seconds, num_bytes / 1e6, mode)
