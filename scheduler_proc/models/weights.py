"""Safetensors files as a Checkpoint: finds each tensor's file and checks the index.

Built by the loader. Files are mapped. Pickles must never be read.
"""

import logging
import struct
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open

from ...kernels.quantised_linear import StreamedRows
from ...model_files.errors import ModelError
from ...model_files.json_file import read_json_object
from ...model_files.pointer import refuse_pointer
from .checkpoint import Index, some_names

HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
INDEX = "model.safetensors.index.json"
log = logging.getLogger(__name__)


class _Stored(Protocol):
    """A tensor in a mapped file, read by slicing."""

    def get_shape(self) -> list[int]: ...

    def __getitem__(self, index: Index, /) -> torch.Tensor: ...


class _File(Protocol):
    """An open safetensors file."""

    def get_slice(self, name: str) -> _Stored: ...


class SafetensorsCheckpoint:
    def __init__(self, directory: Path, *, tied: bool) -> None:
        """Open all files. Raises ModelError for duplicate or unlisted tensors or damaged files."""
        place = _locate(directory)
        _check_total_size(directory, set(place.values()))
        opened: dict[Path, _File] = {path: _open(path) for path in sorted(set(place.values()))}
        self._stored = {name: opened[path].get_slice(name) for name, path in place.items()}
        if tied and HEAD in self._stored:
            self._drop_tied_head()

    @property
    def names(self) -> Collection[str]:
        return self._stored.keys()

    def shape(self, name: str) -> list[int]:
        return self._stored[name].get_shape()

    def read(self, name: str, index: Index) -> torch.Tensor:
        values = self._stored[name][index]
        if not values.dtype.is_floating_point:
            raise ModelError(f"{name} is of type {values.dtype}, which is not supported")
        return values

    def blocks(self, name: str) -> StreamedRows | None:
        return None

    def _drop_tied_head(self) -> None:
        """Drop a head that repeats the embedding. Raises ModelError if it differs from it."""
        head, embedding = self._stored.pop(HEAD), self._stored.get(EMBEDDING)
        if embedding is None:
            return  # check_tensors reports the missing embedding
        if head.get_shape() == embedding.get_shape():
            wanted = tuple(slice(0, size) for size in head.get_shape())
            if torch.equal(head[wanted], embedding[wanted]):
                return
        raise ModelError(
            f"the config says tie_word_embeddings, but the files hold a different {HEAD}; "
            "set tie_word_embeddings to false to use it, or remove it"
        )


def _locate(directory: Path) -> dict[str, Path]:
    """Map tensor names to files: those in the index, or else all. Raises ModelError."""
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
                continue  # a buffer in old checkpoints, computed from the config
            if name in place:
                raise ModelError(f"{name} is both in {place[name].name} and in {path.name}")
            place[name] = path
    if not place:
        raise ModelError(f"{directory} holds no .safetensors files (other formats are not read)")
    if listed is not None:
        _check_index(listed, place)
    return place


def _names(path: Path) -> list[str]:
    with _open(path) as file:
        return list(file.keys())


def _open(path: Path) -> safe_open:
    refuse_pointer(path)
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"cannot read {path}: {error}") from error


def _read_index(path: Path) -> dict[str, str]:
    listed = read_json_object(path).get("weight_map")
    if not isinstance(listed, dict):
        raise ModelError(f"{path} has no weight_map: it is not an index of safetensors files")
    for name, file in listed.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ModelError(
                f"{path}: weight_map says that {name} is in {file!r}, not a file beside it"
            )
    return listed


def _check_total_size(directory: Path, files: Collection[Path]) -> None:
    """Log a warning if the index gives another total size than the files have."""
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
    """Return the bytes of tensors in a safetensors file: all after the length and the header."""
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
        raise ModelError(f"{INDEX} does not list {some_names(unlisted)}")
