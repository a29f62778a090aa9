"""From the bytes of a body to a typed struct, strictly; and the refusal of what we do not do.

Wrong input leaves as InvalidRequest that names the field. Unknown fields are ignored (routers add a
dozen); known ones that would change the answer and cannot be honoured are refused by name.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from ...wire.sampling import InvalidRequest

T = TypeVar("T", bound=msgspec.Struct)

# field -> values that ask for nothing; null always does
Neutral = Mapping[str, tuple[object, ...]]

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")


def parse_fields(body: bytes) -> dict[str, Any]:
    """The body as a plain JSON object; only to look at which fields were set.

    Refuses what the typed decoder would overlook: bytes that are not UTF-8, duplicate keys, and
    nesting too deep for the interpreter.
    """
    try:
        fields = json.loads(body.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest("body", f"the body is not valid JSON: {_reason(error)}") from None
    if not isinstance(fields, dict):
        raise InvalidRequest("body", "the body must be a JSON object")
    return fields


def decode(body: bytes, decoder: "msgspec.json.Decoder[T]") -> T:
    try:
        return decoder.decode(body)
    except RecursionError:
        raise InvalidRequest("body", "the body is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None
    except msgspec.DecodeError as error:
        # What Python's own parser let through: values that JSON does not have.
        for where, what in _not_json(json.loads(body), ""):
            raise InvalidRequest(where, f"{where}: {what} is not valid JSON") from None
        raise InvalidRequest("body", f"the body is not valid JSON: {error}") from None


def _not_json(value: object, where: str) -> Iterator[tuple[str, str]]:
    """The path and the kind of every NaN, infinity and lone surrogate in `value`."""
    match value:
        case float() if not math.isfinite(value):
            yield _field(where), str(value)
        case str() if any("\ud800" <= character <= "\udfff" for character in value):
            yield _field(where), "a lone surrogate"
        case list():
            for index, item in enumerate(value):
                yield from _not_json(item, f"{where}[{index}]")
        case dict():
            for key, item in value.items():
                yield from _not_json(key, where)
                yield from _not_json(item, f"{where}.{key}")


def _named(message: str) -> InvalidRequest:
    """msgspec's "Expected `int`, got `str` - at `$.stop[0]`" with the field as its subject."""
    found = _PATH.search(message)
    param = found.group(1).removesuffix("[...]") if found else ""
    text = message[: found.start()] if found else message
    missing = _MISSING.search(text)
    if missing:
        param = f"{param}.{missing.group(1)}".lstrip(".")
    param = _field(param)
    return InvalidRequest(param, f"{param}: {text}")


def _field(path: str) -> str:
    """A path in the body as complaints name it."""
    return path.removeprefix(".").removeprefix("sampling_params.") or "body"


def refuse_unsupported(fields: dict[str, Any], neutral: Neutral, why: str = "") -> None:
    """Raise InvalidRequest for the first field of `neutral` that is set to something else."""
    for name in fields.keys() & neutral.keys():
        value = fields[name]
        if value is not None and not any(_same(value, known) for known in neutral[name]):
            raise InvalidRequest(name, f"{name} is not supported{why}")


def _same(value: object, known: object) -> bool:
    return type(value) is type(known) and value == known


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("a key appears twice in one object")
    return fields


def _reason(error: ValueError | RecursionError) -> str:
    match error:
        case RecursionError():
            return "nested too deeply"
        case UnicodeDecodeError():
            return "not UTF-8"
        case json.JSONDecodeError():
            return f"{error.msg} at character {error.pos}"
        case _:
            return str(error)
