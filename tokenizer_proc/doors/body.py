"""Decode request bodies to typed structs in one pass of msgspec.

Used by the routes. Nothing untyped is built: a refused field is a `msgspec.Raw`, a view into the
body, and unknown fields are skipped. So an unused object, list or key costs a few nanoseconds and
no memory, and no body blocks the event loop (measured by bench/body_cost.py). Lists whose entries
cost much more than their bytes are Raw too, and are decoded only after their entries were counted.

Wrong input raises InvalidRequest that names the field. Of a repeated key the last value counts;
unknown fields may hold any well-formed JSON.
"""

import re
from collections.abc import Mapping
from typing import Any, Generic, TypeVar, cast

import msgspec

from ...wire.sampling import InvalidRequest
from ..errors import shortened
from ..lengths import TOO_LONG
from ..limits import MAX_PROMPTS
from .refused_fields import Refusal, check_refused

T = TypeVar("T", bound=msgspec.Struct)
V = TypeVar("V")

Prompt = str | list[str] | list[int] | list[list[int]]

_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`")
_MISSING = re.compile(r"missing required field `([^`]*)`")
_UNSET = (b"", b"null")

_texts = msgspec.json.Decoder(str | list[str])
_ids = msgspec.json.Decoder(list[int])
_lists_of_ids = msgspec.json.Decoder(list[list[int]])


class BodyReader(Generic[T]):
    """Reader for the bodies of one route: its struct, and the fields that it refuses by name."""

    def __init__(self, struct: type[T], refused: Mapping[str, Refusal]) -> None:
        self.struct = struct
        self.refused = refused
        fields = [(name, msgspec.Raw, msgspec.Raw()) for name in refused]
        body = msgspec.defstruct(
            f"{struct.__name__}Body", fields, bases=(struct,), frozen=True, kw_only=True
        )
        self._decoder = msgspec.json.Decoder(cast(type[T], body))

    def read(self, body: bytes | msgspec.Raw, where: str = "") -> T:
        """Decode a body; `where` prefixes field names in errors. Raises InvalidRequest."""
        value = decode(body, self._decoder, where)
        for name, refusal in self.refused.items():
            raw: msgspec.Raw = getattr(value, name)
            if raw:
                check_refused(name, bytes(raw), refusal)
        # Do not keep the decoded value: its Raw fields hold the whole body in memory.
        kept: dict[str, Any] = {
            name: getattr(value, name) for name in self.struct.__struct_fields__
        }
        return self.struct(**kept)


def decode(body: bytes | msgspec.Raw, decoder: "msgspec.json.Decoder[V]", where: str = "") -> V:
    if not body:
        raise InvalidRequest(where or "body", "the body is empty: it must be a JSON object")
    try:
        return decoder.decode(body)
    except RecursionError:
        raise InvalidRequest(where or "body", "the body is nested too deeply") from None
    except msgspec.ValidationError as error:
        raise _named(str(error), where) from None
    except msgspec.DecodeError as error:
        reason = str(error)
        if "truncated" in reason:  # msgspec's word for half a surrogate pair, too
            reason += ", or a \\u escape is half of a surrogate pair"
        raise InvalidRequest(where or "body", f"the body is not valid JSON: {reason}") from None


def is_set(raw: msgspec.Raw) -> bool:
    """Return whether a field was given; null means unset."""
    return len(raw) > 4 or bytes(raw) not in _UNSET


def read_ids(raw: msgspec.Raw, name: str, most_ids: int) -> list[int] | list[list[int]]:
    """Decode token ids of one or several prompts; refuse more than `most_ids` without decoding."""
    text = bytes(raw)
    if not re.match(rb"\[\s*\[", text):
        _check_count(text.count(b",") + 1, most_ids, name)
        return decode(raw, _ids, name)
    # Brackets count lists: lists of numbers contain no other brackets.
    prompts = text.count(b"[") - 1
    if prompts > MAX_PROMPTS:
        raise too_many_prompts(prompts, name)
    _check_count(text.count(b",") + 1, most_ids * prompts, name)
    return decode(raw, _lists_of_ids, name)


def read_prompt(raw: msgspec.Raw, name: str, most_ids: int) -> Prompt:
    """Decode a text, texts, token ids, or lists of token ids; the first entry decides which."""
    if re.match(rb'(\[\s*)?"', bytes(raw)):
        return decode(raw, _texts, name)
    return read_ids(raw, name, most_ids)


def too_many_prompts(count: int, name: str) -> InvalidRequest:
    return InvalidRequest(name, f"{name} has {count} prompts; at most {MAX_PROMPTS} are allowed")


def _check_count(count: int, most: int, name: str) -> None:
    if count > most:
        raise InvalidRequest(
            name,
            f"{name} has {count} token ids; the maximum context length allows {most}",
            TOO_LONG,
        )


def _named(message: str, where: str) -> InvalidRequest:
    """Convert msgspec's "Expected `int`, got `str` - at `$.stop[0]`" to name the field first."""
    found = _PATH.search(message)
    param = found.group(1).removesuffix("[...]") if found else ""
    text = message[: found.start()] if found else message
    missing = _MISSING.search(text)
    if missing:
        param = f"{param}.{missing.group(1)}".lstrip(".")
    if where:
        param = where + param if param.startswith("[") else param or where
    param = shortened(param)
    return InvalidRequest(param or "body", f"{param or 'the JSON body'}: {shortened(text)}")
