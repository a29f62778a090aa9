"""Decode frames of the socket door to messages, within bounds. Sockets do not enter.

A msgpack array announces its length, so its bound is checked before entries are decoded. JSON does
not: there the bytes of `sampling`, whose entries cost most, are bounded before decoding.
"""

import re
from typing import TypeVar

import msgspec

from ...wire import codec
from ...wire.client_messages import FromClient
from ...wire.sampling import InvalidRequest
from ..errors import shortened
from ..limits import MAX_QUOTED_CHARS, MAX_REQUEST_ID_CHARS, MAX_SAMPLING_BYTES
from .refused_fields import unknown_field

T = TypeVar("T", bound=msgspec.Struct)

_UNKNOWN = re.compile(r"unknown field `([^`]*)`")


class _Named(msgspec.Struct):
    rid: str = ""


class _Outline(msgspec.Struct):
    sampling: msgspec.Raw = msgspec.Raw()


def read_message(payload: bytes) -> FromClient:
    """Decode a frame; raises InvalidRequest that names the field."""
    try:
        if len(payload) > MAX_SAMPLING_BYTES:
            _check_sampling_bytes(payload)
        return codec.decode_from_client(payload)
    except (msgspec.DecodeError, RecursionError) as error:
        unknown = _UNKNOWN.search(str(error))
        if unknown:
            raise unknown_field(shortened(unknown[1])) from None
        param = _field_of(str(error)) or ""
        raise InvalidRequest(param, f"malformed message: {shortened(str(error))}") from None


def rid_of(payload: bytes) -> str:
    """Return the rid of a malformed message, or "" if it cannot be read."""
    try:
        return _decode(payload, _Named).rid[:MAX_REQUEST_ID_CHARS]
    except (msgspec.DecodeError, RecursionError):
        return ""


def _check_sampling_bytes(payload: bytes) -> None:
    size = len(bytes(_decode(payload, _Outline).sampling))
    if size > MAX_SAMPLING_BYTES:
        raise InvalidRequest(
            "sampling", f"sampling has {size} bytes; at most {MAX_SAMPLING_BYTES} are allowed"
        )


def _decode(payload: bytes, struct: type[T]) -> T:
    decode = msgspec.json.decode if codec.is_json(payload) else msgspec.msgpack.decode
    return decode(payload, type=struct)


def _field_of(error: str) -> str | None:
    """Return the field in a msgspec error, named as `check_sampling` would name it."""
    path = re.search(r"`\$\.?([^`]*)`$", error)
    named = re.search(r"field `([^`]*)`", error)
    parts = re.sub(r"\[[^]]*\]", "", path[1]).split(".") if path else []
    names = [name for name in [*parts, *([named[1]] if named else [])] if name]
    if names[:1] == ["sampling"] and len(names) > 1:
        names = names[1:]
    return names[0][:MAX_QUOTED_CHARS] if names else None
