"""Whole numbers as clients write them: JSON has one kind of number, so 4 may come as 4.0. PURE."""

from typing import overload

from ..wire.sampling import InvalidRequest

Number = int | float  # a field's type; float alone would round a large int


@overload
def whole(value: Number, name: str) -> int: ...
@overload
def whole(value: Number | None, name: str) -> int | None: ...
def whole(value: Number | None, name: str) -> int | None:
    """The int that `value` is; InvalidRequest for the field `name` where it has a fraction."""
    if isinstance(value, float):
        if not value.is_integer():
            raise InvalidRequest(name, f"{name} must be a whole number, got {value}")
        return int(value)
    return value
