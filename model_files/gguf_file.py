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


def metadata(reader: GGUFReader) -> dict[str, Any]:
    """All key-value pairs; arrays as lists."""
    return {name: field.contents() for name, field in reader.fields.items()}
