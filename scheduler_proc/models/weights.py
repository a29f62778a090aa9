"""Filling a model's parameters from safetensors files, and the rules that hold for any format.

Called by the loader. Every tensor of the files is used or named in an error, and so is every
parameter that no file fills. Files are mapped; pickles are never read.
"""

import logging
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from ...model_files.errors import ModelError
from ...model_files.json_file import read_json_object
from ...model_files.pointer import refuse_pointer
from .llama import LlamaForCausalLM
from .parallel import Sliceable

HEAD = "lm_head.weight"
INDEX = "model.safetensors.index.json"
log = logging.getLogger(__name__)
Shapes = dict[str, list[int]]
Progress = Callable[[int], object]  # called with the bytes of each parameter that was filled


def fill_from_safetensors(model: LlamaForCausalLM, directory: Path, progress: Progress) -> None:
    """The files' names and shapes have been checked. Raises ModelError for a wrong type or head."""
    place = _locate(directory)
    for path in sorted(set(place.values())):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                if name in model.weight_slots:
                    fill(model, name, _read(file, model, name))
                    progress(model.weight_slots[name].nbytes)
    if _ignored_head(model) in place:
        with safe_open(place[HEAD], framework="pt") as file:
            check_tied_head(model, file.get_tensor(HEAD))


def check_tensors(model: LlamaForCausalLM, shapes: Mapping[str, Sequence[int]]) -> None:
    """Compare what the files hold with what the model needs, which may have no memory yet.

    Raises ModelError for missing, unknown or misshapen tensors.
    """
    check_names(shapes.keys() - {_ignored_head(model)}, model.weight_slots)
    for name in model.weight_slots:
        check_shape(model, name, shapes[name])


def safetensors_shapes(directory: Path) -> Shapes:
    """Tensor name -> shape, from the files' headers. Raises ModelError, also for doubled names."""
    place = _locate(directory)
    _check_total_size(directory, set(place.values()))
    shapes: Shapes = {}
    for path in sorted(set(place.values())):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  (not a mapping)
                shapes[name] = list(file.get_slice(name).get_shape())
    return {name: shapes[name] for name in place}


class _File(Protocol):
    """An open safetensors file."""

    def get_tensor(self, name: str) -> torch.Tensor: ...

    def get_slice(self, name: str) -> Sliceable: ...


def _read(file: _File, model: LlamaForCausalLM, name: str) -> torch.Tensor:
    """What the slot takes of a tensor; no other part of it is read."""
    cut = model.cuts.get(name)
    if cut is None:
        return file.get_tensor(name)
    return cut.of(file.get_slice(name))


def _ignored_head(model: LlamaForCausalLM) -> str | None:
    """A tied model's files may repeat the embedding as the head: compared, not loaded."""
    return HEAD if model.spec.tied else None


def check_names(found: Collection[str], wanted: Collection[str]) -> None:
    """Both ways: nothing in the files is left unused, no parameter is left empty."""
    unknown = [name for name in found if name not in wanted]
    if unknown:
        raise ModelError(f"the model files hold tensors that are not used: {_some(unknown)}")
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ModelError(f"the model files lack tensors: {_some(missing)}")


def fill(model: LlamaForCausalLM, name: str, tensor: torch.Tensor) -> None:
    """`tensor` is what the slot takes of one whose shape has been checked."""
    if not tensor.dtype.is_floating_point:
        raise ModelError(f"{name} is of type {tensor.dtype}, which is not supported")
    model.weight_slots[name].copy_(tensor)


def check_shape(model: LlamaForCausalLM, name: str, shape: Sequence[int]) -> None:
    """Of the checkpoint's tensor, all of it."""
    wanted = model.checkpoint_shape(name)
    if list(shape) != wanted:
        raise ModelError(f"{name} has shape {list(shape)}, the config asks for {wanted}")


def check_tied_head(model: LlamaForCausalLM, head: torch.Tensor) -> None:
    """A head that differs from the embedding contradicts the config: neither may win silently."""
    if not torch.equal(head.to(model.embedding), model.embedding):
        raise ModelError(
            f"the config says tie_word_embeddings, but the files hold a different {HEAD}; "
            "set tie_word_embeddings to false to use it, or remove it"
        )


def _locate(directory: Path) -> dict[str, Path]:
    """Tensor name -> file. An index says which files count; without one, all of them do."""
    index = directory / INDEX
    listed = _read_index(index) if index.is_file() else None
    if listed is not None:
        paths: Iterable[Path] = sorted({directory / file for file in listed.values()})
    else:
        paths = sorted(directory.glob("*.safetensors"))
    place: dict[str, Path] = {}
    for path in paths:
        for name in _names(path):
            if name.endswith("rotary_emb.inv_freq"):
                continue  # a buffer old checkpoints saved; the config says the same
            if name in place:
                raise ModelError(f"{name} is both in {place[name].name} and in {path.name}")
            place[name] = path
    if not place:
        raise ModelError(f"{directory} holds no .safetensors files (other formats are not read)")
    if listed is not None:
        _check_index(listed, place)
    return place


def _names(path: Path) -> list[str]:
    refuse_pointer(path)
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error


def _read_index(path: Path) -> dict[str, str]:
    listed = read_json_object(path).get("weight_map")
    if not isinstance(listed, dict):
        raise ModelError(f"{path} has no weight_map: it is no index of safetensors files")
    for name, file in listed.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(
                f"{path}: weight_map says that {name} is in {file!r}, no file beside it"
            )
    return listed


def _check_total_size(directory: Path, files: Collection[Path]) -> None:
    """Warn where the index, if there is one, tells another size than its files have."""
    told = read_json_object(directory / INDEX).get("metadata")
    total = told.get("total_size") if isinstance(told, dict) else None
    found = sum(_data_bytes(path) for path in files)
    if total is not None and total != found:
        log.warning(
            "%s says total_size %.80r, but its files hold %d bytes of tensors",
            directory / INDEX,
            total,
            found,
        )


def _data_bytes(path: Path) -> int:
    """The bytes of a safetensors file behind its header, whose length stands in front."""
    with path.open("rb") as file:
        (header,) = struct.unpack("<Q", file.read(8))
    return path.stat().st_size - 8 - int(header)


def _check_index(listed: dict[str, str], place: dict[str, Path]) -> None:
    for name, file in listed.items():
        if not name.endswith("rotary_emb.inv_freq") and (
            name not in place or place[name].name != file
        ):
            raise ModelError(f"{INDEX} says that {name} is in {file}, but it is not")
    unlisted = [name for name in place if name not in listed]
    if unlisted:
        raise ModelError(f"{INDEX} does not list {_some(unlisted)}")


def _some(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
