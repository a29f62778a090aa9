"""From the bytes of a body to a typed struct, in one pass of the decoder.

Nothing untyped is built: a field that is refused is a `msgspec.Raw`, a view into the body, and what
no struct names is skipped. So an object, a list or a key that nobody asked for costs a few
nanoseconds and no memory, and no body holds the event loop (bench/body_cost.py measures it). Lists
whose entries cost much more than their bytes are fields of type Raw too, and are decoded only after
their entries were counted.

Wrong input leaves as InvalidRequest that names the field. A key that stands twice has its last
value; fields that nobody reads are skipped with whatever well-formed JSON they hold.
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
    """Reads bodies of one route: its struct, and the fields that it refuses by name."""

    def __init__(self, struct: type[T], refused: Mapping[str, Refusal]) -> None:
        self.struct = struct
        self.refused = refused
        fields = [(name, msgspec.Raw, msgspec.Raw()) for name in refused]
        body = msgspec.defstruct(
            f"{struct.__name__}Body", fields, bases=(struct,), frozen=True, kw_only=True
        )
        self._decoder = msgspec.json.Decoder(cast(type[T], body))

    def read(self, body: bytes | msgspec.Raw, where: str = "") -> T:
        """`where` is the field that holds the object, for complaints. Raises InvalidRequest."""
        value = decode(body, self._decoder, where)
        for name, refusal in self.refused.items():
            raw: msgspec.Raw = getattr(value, name)
            if raw:
                check_refused(name, bytes(raw), refusal)
        # Not the decoded value: its Raw fields keep the whole body in memory.
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
        if "truncated" in reason:  # so msgspec says of half a surrogate pair, too
            reason += ", or a \\u escape is half of a surrogate pair"
        raise InvalidRequest(where or "body", f"the body is not valid JSON: {reason}") from None


def is_set(raw: msgspec.Raw) -> bool:
    """Whether a field was given; null means unset."""
    return len(raw) > 4 or bytes(raw) not in _UNSET


def read_ids(raw: msgspec.Raw, name: str, most_ids: int) -> list[int] | list[list[int]]:
    """Token ids of one prompt or of several. Nothing is decoded that is longer than `most_ids`."""
    text = bytes(raw)
    if not re.match(rb"\[\s*\[", text):
        _check_count(text.count(b",") + 1, most_ids, name)
        return decode(raw, _ids, name)
    # Every list begins with a bracket, and lists of numbers hold no others.
    prompts = text.count(b"[") - 1
    if prompts > MAX_PROMPTS:
        raise too_many_prompts(prompts, name)
    _check_count(text.count(b",") + 1, most_ids * prompts, name)
    return decode(raw, _lists_of_ids, name)


def read_prompt(raw: msgspec.Raw, name: str, most_ids: int) -> Prompt:
    """A text, texts, token ids, or lists of token ids, as the first entry tells."""
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
    """msgspec's "Expected `int`, got `str` - at `$.stop[0]`" with the field as its subject."""
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
