"""What can still be read from a socket message that does not decode: its rid, and the wrong field.

Used by the socket door for its answer.
"""

import re

import msgspec

from ...wire import codec
from ..limits import MAX_REQUEST_ID_CHARS

MAX_ERROR_CHARS = 500  # decode errors quote their input


class _Named(msgspec.Struct):
    rid: str = ""


def rid_of(payload: bytes) -> str:
    """The rid of a message that is wrong otherwise, as far as it can be read."""
    decode = msgspec.json.decode if codec.is_json(payload) else msgspec.msgpack.decode
    try:
        return decode(payload, type=_Named).rid[:MAX_REQUEST_ID_CHARS]
    except (msgspec.DecodeError, RecursionError):
        return ""


def field_of(error: Exception) -> str | None:
    """The field that msgspec complains of, named as `check_sampling` would name it."""
    path = re.search(r"`\$\.?([^`]*)`$", str(error))
    named = re.search(r"field `([^`]*)`", str(error))
    parts = re.sub(r"\[[^]]*\]", "", path[1]).split(".") if path else []
    names = [name for name in [*parts, *([named[1]] if named else [])] if name]
    if names[:1] == ["sampling"] and len(names) > 1:
        names = names[1:]
    return names[0][:MAX_ERROR_CHARS] if names else None
