"""The metadata of a GGUF file as plain values, read without torch.

Called by config and by the text side; the tensors are read by the scheduler's weights loader.
Nothing about a particular architecture enters here.
"""

import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType

from .errors import ModelError

Metadata = dict[str, Any]


class _Reader(GGUFReader):
    """The package's reader, except that an array is taken in one go.

    The original makes several numpy views an element, which costs seconds for a vocabulary.
    """

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[Any], list[int], list[GGUFValueType]]:
        if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
            return super()._get_field_parts(orig_offs, raw_type)
        view = self.data.data
        item, count = struct.unpack_from("<IQ", view, orig_offs)
        start = orig_offs + 12
        kinds = [GGUFValueType.ARRAY, GGUFValueType(item)] if count else [GGUFValueType.ARRAY]
        if item == GGUFValueType.STRING:
            ends = _string_ends(view, start, count)
            plain = np.frombuffer(view, dtype=np.uint8)
            strings = [plain[a + 8 : b] for a, b in pairwise(ends)]
            return ends[-1] - orig_offs, strings, list(range(count)), kinds
        scalar = self.gguf_scalar_to_np.get(GGUFValueType(item))
        if scalar is None:
            raise ValueError(f"an array of type {item} is not understood")
        values = np.frombuffer(view, dtype=scalar, count=count, offset=start)
        return 12 + values.nbytes, [values], [0], kinds


def _string_ends(view: memoryview, start: int, count: int) -> list[int]:
    """Where each of `count` strings (a 64-bit length, then bytes) ends, with `start` in front."""
    ends = [start]
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", view, ends[-1])
        ends.append(ends[-1] + 8 + length)
    if ends[-1] > len(view):
        raise ValueError("the file ends inside an array of strings")
    return ends


def open_gguf(path: str | Path) -> GGUFReader:
    """Map the file. Raises ModelError if it is no complete, little-endian GGUF file."""
    try:
        reader = _Reader(path)
    except (ValueError, OSError, LookupError, OverflowError, struct.error) as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error}") from error
    if reader.byte_order != "I":
        raise ModelError(f"{path} is a GGUF file of the other byte order; convert it first")
    return reader


def metadata(reader: GGUFReader) -> Metadata:
    """All key-value pairs; arrays as lists. Raises ModelError for text that is not UTF-8."""
    found: Metadata = {}
    for name, field in reader.fields.items():
        try:
            found[name] = field.contents()
        except UnicodeDecodeError as error:
            raise ModelError(f"{_file_name(reader)}: {name} is not UTF-8: {error}") from error
    return found


def text(meta: Metadata, key: str) -> str | None:
    """The value of a key that holds text; None if it is absent. Raises ModelError."""
    value = meta.get(key)
    if value is not None and not isinstance(value, str):
        raise ModelError(f"{key} must be text, got {value!r:.80}")
    return value


def integer(meta: Metadata, key: str) -> int | None:
    value = meta.get(key)
    if value is not None and type(value) is not int:
        raise ModelError(f"{key} must be an integer, got {value!r:.80}")
    return value


def flag(meta: Metadata, key: str, default: bool) -> bool:
    value = meta.get(key, default)
    if type(value) is not bool:
        raise ModelError(f"{key} must be true or false, got {value!r:.80}")
    return value


def texts(meta: Metadata, key: str) -> list[str]:
    """The entries of an array of texts; empty if the key is absent."""
    return _entries(meta, key, str, "texts")


def numbers(meta: Metadata, key: str) -> list[int | float]:
    return _entries(meta, key, (int, float), "numbers")


def _entries(meta: Metadata, key: str, kind: type | tuple[type, ...], what: str) -> list[Any]:
    values = meta.get(key, [])
    # An array has one type: its first entry tells that of all.
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values[:1]):
        raise ModelError(f"{key} must be an array of {what}")
    return values


def _file_name(reader: GGUFReader) -> str:
    return str(getattr(reader.data, "filename", "the GGUF file"))
