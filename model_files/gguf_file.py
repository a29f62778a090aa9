"""The metadata of a GGUF file as plain values. Tensors are read by the scheduler's weights loader."""

from pathlib import Path
from typing import Any

from gguf import GGUFReader

from .errors import ModelError


def open_gguf(path: str | Path) -> GGUFReader:
    """Map the file. Raises ModelError if it is no GGUF file."""
    try:
        return GGUFReader(path)
    except (ValueError, OSError) as error:
        raise ModelError(f"{path} is not a readable GGUF file: {error}") from error


def metadata(reader: GGUFReader) -> dict[str, Any]:
    """All key-value pairs; arrays as lists."""
    return {name: field.contents() for name, field in reader.fields.items()}
