"""From a local path to a model ready to run. Called by the runner, once."""

import logging
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from ...kernels.quantised_linear import Kind, Rows, release_memory
from ...model_files.config import read_config
from ...model_files.errors import ModelError, names_the_file
from .config import ModelSpec, parse_spec
from .gguf_weights import exact_rows, fill_from_gguf, gguf_shapes
from .llama import LlamaForCausalLM
from .packed import PackedLlama, pack_model, whole_groups
from .parallel import WHOLE, Shard
from .registry import MODELS
from .weights import Progress, check_tensors, fill_from_safetensors, safetensors_shapes

log = logging.getLogger(__name__)
LoadFormat = Literal["auto", "dummy"]
NOTHING: Mapping[str, Rows] = {}
_DUMMY_SEED = 0
_DUMMY_STD = 0.02


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
    """The model of a directory or .gguf file, its weights in `dtype` on `device`.

    `dummy` reads the config alone and makes seeded random weights. `context_length` in tokens
    lowers the model's own limit. Of several ranks each reads its `shard`. Raises ModelError with
    the reason and what to do.
    """
    spec = _read_spec(path, context_length)
    _check_files(path, spec, load_format)
    started = time.perf_counter()
    mode = str(dtype).removeprefix("torch.")
    _log_start(path, spec, mode)
    model = MODELS[spec.architecture](spec, dtype, device, shard)
    num_bytes = sum(slot.nbytes for slot in model.weight_slots.values())
    _fill(model, path, load_format)
    model.finish()
    _log_end(num_bytes, mode, started)
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
    """The same with packed weights for the native CPU library; see kernels/quantised_linear.py.

    Tensors of a GGUF file whose type the packed formats hold exactly are not quantised again,
    where they suit `kind`. Raises ModelError, and NativeMissing where there is no library.
    """
    spec = _read_spec(path, context_length)
    _check_files(path, spec, load_format)
    started = time.perf_counter()
    _log_start(path, spec, kind)
    exact: dict[str, Rows] = {}
    if path.endswith(".gguf") and load_format == "auto":
        exact = whole_groups(exact_rows(path, spec))
    if kind == "int8":
        exact = {name: rows for name, rows in exact.items() if rows.format == "Q8_0"}
    model = MODELS[spec.architecture](spec, torch.float32, "cpu")
    _fill(model, path, load_format, exact)
    packed = pack_model(model, kind, exact, threads)
    del model, exact
    release_memory()
    _log_end(packed.nbytes, kind, started)
    return packed


def _log_start(path: str, spec: ModelSpec, mode: str) -> None:
    log.info("loading %s (%s) in %s", path, spec.architecture, mode)


def _log_end(num_bytes: int, mode: str, started: float) -> None:
    seconds = time.perf_counter() - started
    log.info("loaded in %.1f s: %.0f MB of weights in %s", seconds, num_bytes / 1e6, mode)


def _read_spec(path: str, context_length: int | None) -> ModelSpec:
    return limit_context(parse_spec(read_config(path)), context_length)


def _check_files(path: str, spec: ModelSpec, load_format: LoadFormat) -> None:
    """Hold the files to the config before anything is allocated for either. Raises ModelError."""
    if load_format == "dummy":
        return
    empty = MODELS[spec.architecture](spec, torch.float32, "meta")
    gguf = path.endswith(".gguf")
    check_tensors(empty, gguf_shapes(path) if gguf else safetensors_shapes(Path(path)))


def _fill(
    model: LlamaForCausalLM,
    path: str,
    load_format: LoadFormat,
    exact: Mapping[str, Rows] = NOTHING,
) -> None:
    """What is in `exact` stays empty: memory that is never touched costs nothing."""
    total = sum(slot.nbytes for name, slot in model.weight_slots.items() if name not in exact)
    with _bar(total) as bar:
        _read(model, path, load_format, exact, bar.update)


def limit_context(spec: ModelSpec, context_length: int | None) -> ModelSpec:
    if context_length is None:
        return spec
    if context_length > spec.context_length:
        raise ModelError(
            f"context length {context_length} is above the model's own {spec.context_length}"
        )
    return replace(spec, context_length=context_length)


def _read(
    model: LlamaForCausalLM,
    path: str,
    load_format: LoadFormat,
    exact: Mapping[str, Rows],
    progress: Progress,
) -> None:
    if load_format == "dummy":
        fill_dummy(model)
    elif path.endswith(".gguf"):
        fill_from_gguf(model, path, exact, progress)
    else:
        fill_from_safetensors(model, Path(path), progress)


def fill_dummy(model: LlamaForCausalLM) -> None:
    """Norms one, the rest small and normal: the logits stay finite at any depth.

    A device makes its own: the billions of a large model would take a CPU a minute. Ranks draw
    whole tensors, so that their shares are those of one model.
    """
    slots = model.weight_slots
    device = next(iter(slots.values())).device
    generator = torch.Generator(device).manual_seed(_DUMMY_SEED)
    for name, slot in slots.items():
        if name.endswith("norm.weight"):
            slot.fill_(1.0)
        else:
            whole = torch.empty(model.checkpoint_shape(name), device=device)
            whole.normal_(0.0, _DUMMY_STD, generator=generator)
            slot.copy_(model.cuts[name].of(whole) if name in model.cuts else whole)


def _bar(total: int) -> "tqdm[None]":
    """Shown to a person only; a log gets one line before and one after."""
    return tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc="weights",
        leave=False,
        disable=not sys.stderr.isatty(),
    )
