"""Whole numbers in JSON bodies, where 4 may be written as 4.0. PURE."""

from typing import overload

from ..wire.sampling import InvalidRequest

_MOST = 1 << 64  # no field takes more, and a huge number would fill an error message
Number = int | float  # a field's type; float alone would round a large int


@overload
def whole(value: Number, name: str) -> int: ...
@overload
def whole(value: Number | None, name: str) -> int | None: ...
def whole(value: Number | None, name: str) -> int | None:
    """Convert `value` to int; raises InvalidRequest for field `name` if it has a fraction."""
    if isinstance(value, float):
        if not value.is_integer():
            raise InvalidRequest(name, f"{name} must be a whole number, got {value}")
        value = int(value)
    if value is not None and not -_MOST <= value <= _MOST:
        raise InvalidRequest(name, f"{name} must fit 64 bits")
    return value
