"""Load a PEFT directory as a LoRAAdapter. Called by the runner, off the thread that runs steps.

The files are not trusted: paths are resolved and checked against the roots, sizes are bounded
before reading, files are read and not mapped (a mapped file that shrinks kills the process), and
pickles are never opened. Every tensor must belong to a module that the config targets, and every
targeted module must have its tensors.

Only shapes decide whether an adapter suits the base model: base_model_name_or_path is often a path
on the machine that trained it. Adapter tensors are in Hugging Face order, and so are the model's
weights: the loader brings those of GGUF files into it, including interleaved queries and keys.
"""

import os
import reprlib
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load

from ...model_files.errors import AdapterError
from ..models.config import ModelSpec
from ..models.lora import EMBED, HEAD, Key, LoRAAdapter, LoRAModule, map_sizes
from .lora_config import TargetedModules, parse_peft_config

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
_HEADER_BYTES = 1 << 20
_CONFIG_BYTES = 1 << 18
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_PREFIX = "base_model.model."
_MODULES = {  # of a layer
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


@dataclass(slots=True, frozen=True)
class _Place:
    """A module of the model that an adapter may target."""

    key: Key
    inputs: int
    outputs: int

    def names(self, module: str) -> tuple[str, str]:
        """The names of `a` and `b` in the weights file."""
        if self.key == EMBED:
            return f"{_PREFIX}{module}.lora_embedding_A", f"{_PREFIX}{module}.lora_embedding_B"
        return f"{_PREFIX}{module}.lora_A.weight", f"{_PREFIX}{module}.lora_B.weight"


def load_adapter(path: Path, spec: ModelSpec, roots: Sequence[Path], max_rank: int) -> LoRAAdapter:
    """Read the adapter in a directory below one of `roots`; a relative path starts at each root.

    Raises AdapterError naming what is wrong, and leaves nothing behind.
    """
    directory, root = _find(path, roots)
    config = parse_peft_config(_read(directory / CONFIG, root, _CONFIG_BYTES))
    places = _places(spec)
    targeted = TargetedModules(config, list(places))
    wanted = {module: place for module, place in places.items() if targeted.targets(module)}
    if not wanted:
        asked = reprlib.repr(config.target_modules)
        raise AdapterError(f"target_modules {asked} name no module of the model")
    _check_ranks(targeted, wanted, max_rank)
    tensors = _parse(_read(directory / WEIGHTS, root, _size_bound(spec, places, max_rank)))
    _drop_frozen_copies(tensors, wanted, spec)
    _check_names(tensors, wanted)
    modules = {
        place.key: _module(tensors, module, place, targeted) for module, place in wanted.items()
    }
    return LoRAAdapter(modules, max(targeted.rank(module) for module in wanted))


def _places(spec: ModelSpec) -> dict[str, _Place]:
    """The modules that adapters may target, by name, in model order."""
    sizes = map_sizes(spec)

    def place(key: Key) -> _Place:
        return _Place(key, *sizes[key[1]])

    places = {"model.embed_tokens": place(EMBED)}
    for layer in range(spec.num_layers):
        for name, module in _MODULES.items():
            places[f"model.layers.{layer}.{module}"] = place((layer, name))
    return places | {"lm_head": place(HEAD)}


def _find(path: Path, roots: Sequence[Path]) -> tuple[Path, Path]:
    """The adapter directory and the root above it, both resolved. Raises AdapterError.

    The error is the same for a path outside the roots and for a missing one, to reveal nothing.
    """
    for root in roots:
        try:
            real_root = root.resolve(strict=True)
            directory = (real_root / path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):  # not there, a NUL byte, a loop of links
            continue
        if directory.is_relative_to(real_root) and directory.is_dir():
            return directory, real_root
    shown = ", ".join(str(root) for root in roots) or "none is configured"
    raise AdapterError(f"{path} is no directory below an adapter root ({shown})")


def _read(path: Path, root: Path, limit: int) -> bytes:
    """Read a file of at most `limit` bytes; a link may lead anywhere below the root."""
    try:
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        if path.name == WEIGHTS and (path.parent / PICKLE).exists():
            raise AdapterError(
                f"{PICKLE} is a pickle, which is not read: save the adapter as {WEIGHTS}"
            ) from error
        raise AdapterError(f"there is no {path}") from error
    if not real.is_relative_to(root):
        raise AdapterError(f"{path} is a link that leads out of {root}")
    try:
        with open(real, "rb", opener=_open) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise AdapterError(f"{path} is no regular file")
            data = file.read(status.st_size) if status.st_size <= limit else b""
    except OSError as error:
        raise AdapterError(f"cannot read {path}: {error.strerror}") from error
    if status.st_size > limit:
        raise AdapterError(
            f"{path} has {status.st_size} bytes, more than any adapter of this model can ({limit})"
        )
    return data


def _open(path: str, flags: int) -> int:
    """Open a file, but follow no link made since it was resolved, and never block on a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _size_bound(spec: ModelSpec, places: dict[str, _Place], max_rank: int) -> int:
    """Most bytes of a weights file: every module at `max_rank` in float32, embedding and head."""
    ranked = sum(place.inputs + place.outputs for place in places.values()) * max_rank
    return (ranked + 2 * spec.vocab_size * spec.hidden_size) * 4 + _HEADER_BYTES


def _parse(data: bytes) -> dict[str, torch.Tensor]:
    try:
        return load(data)
    except (SafetensorError, KeyError, ValueError, AssertionError) as error:
        raise AdapterError(f"{WEIGHTS} is no safetensors file: {error}") from error


def _check_ranks(targeted: TargetedModules, wanted: dict[str, _Place], max_rank: int) -> None:
    for module in wanted:
        rank = targeted.rank(module)
        if rank > max_rank:
            raise AdapterError(f"{module} has rank {rank}, above --max-lora-rank {max_rank}")


def _drop_frozen_copies(
    tensors: dict[str, torch.Tensor], wanted: dict[str, _Place], spec: ModelSpec
) -> None:
    """Drop the frozen embedding and head, which peft saves with an adapter that targets either.

    They are copies of the base model's, and only their shapes are checked: a quantised model has no
    equal values to compare them with.
    """
    if not any(place.key in (EMBED, HEAD) for place in wanted.values()):
        return
    for module in ("model.embed_tokens", "lm_head"):
        tensor = tensors.pop(f"{_PREFIX}{module}.base_layer.weight", None)
        if tensor is not None and tensor.shape != (spec.vocab_size, spec.hidden_size):
            raise AdapterError(
                f"{module} had shape {list(tensor.shape)} in training, and the model has "
                f"{[spec.vocab_size, spec.hidden_size]}: another base model, or added tokens"
            )


def _check_names(tensors: dict[str, torch.Tensor], wanted: dict[str, _Place]) -> None:
    """Raise AdapterError for a tensor that the config does not target, or a missing tensor."""
    asked = {name for module, place in wanted.items() for name in place.names(module)}
    unused = tensors.keys() - asked
    if unused:
        raise AdapterError(
            f"{WEIGHTS} holds tensors that the config does not target, or that the model has no "
            f"place for: {_some(unused)}"
        )
    missing = asked - tensors.keys()
    if missing:
        raise AdapterError(f"{WEIGHTS} lacks tensors that the config targets: {_some(missing)}")


def _module(
    tensors: dict[str, torch.Tensor], module: str, place: _Place, targeted: TargetedModules
) -> LoRAModule:
    rank, scaling = targeted.rank(module), targeted.scaling(module)
    name_a, name_b = place.names(module)
    a = _checked(name_a, tensors.pop(name_a), (rank, place.inputs))
    b = _checked(name_b, tensors.pop(name_b), (place.outputs, rank)).mul_(scaling)
    if not bool(b.isfinite().all()):
        raise AdapterError(f"{name_b} overflows when multiplied by the scaling {scaling}")
    return LoRAModule(a, b)


def _checked(name: str, tensor: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """Check shape, type and finiteness of a tensor; return a float32 copy."""
    if tensor.shape != shape:
        raise AdapterError(
            f"{name} has shape {list(tensor.shape)}, config and model ask for {list(shape)}"
        )
    if tensor.dtype not in _DTYPES:
        raise AdapterError(f"{name} is of type {tensor.dtype}, which is not supported")
    if not bool(tensor.isfinite().all()):
        raise AdapterError(f"{name} holds values that are not finite")
    return tensor.to(torch.float32, copy=True)


def _some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
