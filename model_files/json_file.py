"""Reader of JSON files in a model's directory. Called by the other readers of a model's files."""

from pathlib import Path
from typing import Any

import msgspec

from .errors import ModelError
from .pointer import refuse_pointer


def read_json_object(file: Path, *, required: bool = False) -> dict[str, Any]:
    """Read a JSON object; {} if the file is absent and not required. Raises ModelError."""
    if not required and not file.is_file():
        return {}
    refuse_pointer(file)
    try:
        return msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ModelError(f"{file} cannot be read: {error}") from error
