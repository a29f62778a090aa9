"""Reader of the metadata of a GGUF file, without torch.

Called by `config`, the tokenizer modules and models/gguf_weights.py, which reads the tensors. Facts
about particular architectures must not enter.
"""

import math
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType
from gguf.gguf_reader import ReaderField

from .errors import ModelError
from .pointer import refuse_pointer

Metadata = dict[str, Any]


class _Reader(GGUFReader):
    """The gguf package's reader, with arrays read at once and truncated files refused.

    The original makes several numpy views per element, which costs seconds for a vocabulary, and
    silently accepts a truncated file.
    """

    def _get(
        self,
        offset: int,
        dtype: npt.DTypeLike,
        count: int = 1,
        override_order: Literal["I", "S", "<"] | None = None,
    ) -> npt.NDArray[Any]:
        if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
            raise ModelError(f"it is cut short: the header ends after byte {len(self.data)}")
        found: npt.NDArray[Any] = super()._get(offset, dtype, count, override_order)
        return found

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
            raise ValueError(f"an array has the unknown type {item}")
        values = np.frombuffer(view, dtype=scalar, count=count, offset=start)
        return 12 + values.nbytes, [values], [0], kinds

    def _build_tensors(self, start_offs: int, fields: list[ReaderField]) -> None:
        """Build the tensors. Raises ModelError if the file ends before a tensor's data."""
        for field in fields:
            end = start_offs + _data_end(field)
            if end > len(self.data):
                raise ModelError(
                    f"it is cut short: tensor {field.name} ends at byte {end}, "
                    f"the file at {len(self.data)}"
                )
        super()._build_tensors(start_offs, fields)


def _data_end(field: ReaderField) -> int:
    """Return the end of a tensor's data, in bytes from the start of all data. Raises ModelError."""
    _, _, _, dims, raw_type, offset = field.parts
    try:
        kind = GGMLQuantizationType(int(raw_type[0]))
    except ValueError as error:
        raise ModelError(f"tensor {field.name} has the unknown type {int(raw_type[0])}") from error
    block, block_bytes = GGML_QUANT_SIZES[kind]
    sizes = [int(size) for size in dims]
    if not sizes or min(sizes) < 1 or sizes[0] % block:
        raise ModelError(f"tensor {field.name} of type {kind.name} has the shape {sizes}")
    return int(offset[0]) + math.prod(sizes) // block * block_bytes


def _string_ends(view: memoryview, start: int, count: int) -> list[int]:
    """Return `start`, then the end of each of `count` strings (a 64-bit length, then bytes).

    Raises ValueError if the file is too short.
    """
    if count * 8 > len(view) - start:
        raise ValueError("the file ends inside an array of strings")
    ends = [start]
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", view, ends[-1])
        ends.append(ends[-1] + 8 + length)
    if ends[-1] > len(view):
        raise ValueError("the file ends inside an array of strings")
    return ends


def open_gguf(path: str | Path) -> GGUFReader:
    """Map the file. Raises ModelError if it is not a complete, little-endian GGUF file."""
    refuse_pointer(Path(path))
    try:
        reader = _Reader(path)
    except struct.error as error:
        raise ModelError(f"{path} is not a readable GGUF file: it is cut short") from error
    except (ValueError, OSError, LookupError, OverflowError) as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error}") from error
    if reader.byte_order != "I":
        raise ModelError(f"{path} is a GGUF file of the other byte order; convert it first")
    return reader


def metadata(reader: GGUFReader) -> Metadata:
    """Return all key-value pairs, arrays as lists. Raises ModelError for invalid UTF-8."""
    found: Metadata = {}
    for name, field in reader.fields.items():
        try:
            found[name] = field.contents()
        except UnicodeDecodeError as error:
            raise ModelError(f"{_file_name(reader)}: {name} is not UTF-8: {error}") from error
    return found


def text(meta: Metadata, key: str) -> str | None:
    """Return the text at `key`, or None if absent. Raises ModelError for another type."""
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
    """Return the array of texts at `key`, or [] if absent. Raises ModelError for another type."""
    return _entries(meta, key, str, "texts")


def numbers(meta: Metadata, key: str) -> list[int | float]:
    return _entries(meta, key, (int, float), "numbers")


def _entries(meta: Metadata, key: str, kind: type | tuple[type, ...], what: str) -> list[Any]:
    values = meta.get(key, [])
    # A GGUF array has one type, so checking the first entry is enough.
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values[:1]):
        raise ModelError(f"{key} must be an array of {what}")
    return values


def _file_name(reader: GGUFReader) -> str:
    return str(getattr(reader.data, "filename", "the GGUF file"))
