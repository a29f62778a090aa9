"""Labels: priority, tenant and cache namespace of a request. PURE.

Every door turns its client's fields into Labels here and passes them to `Front.submit`; the
scheduler applies them.
"""

import hashlib
from typing import Protocol

import msgspec

from ..wire.sampling import InvalidRequest
from .limits import MAX_LABEL_CHARS
from .whole_numbers import Number, whole

_INT32 = 1 << 31
_BEARER = b"bearer "


class Labels(msgspec.Struct, frozen=True):
    priority: int = 0
    tenant: str = ""
    namespace: str = ""


NO_LABELS = Labels()


class Labelled(Protocol):
    """The fields as clients send them, named alike at every door; None means unset."""

    @property
    def priority(self) -> Number | None: ...

    @property
    def user(self) -> str | None: ...

    @property
    def cache_salt(self) -> str | None: ...


def labels_of(request: Labelled, authorization: bytes | None = None) -> Labels:
    """Build Labels; the tenant is `user`, else a hash of the token. Raises InvalidRequest."""
    priority = whole(request.priority, "priority") or 0
    user, salt = request.user or "", request.cache_salt
    if not -_INT32 <= priority < _INT32:
        raise InvalidRequest("priority", "priority must fit 32 signed bits")
    _check_length("user", user)
    if salt is not None:
        if not salt:  # an empty salt would select the shared cache
            raise InvalidRequest("cache_salt", "cache_salt is empty")
        _check_length("cache_salt", salt)
    return Labels(priority, user or _holder(authorization), salt or "")


def _check_length(name: str, text: str) -> None:
    if len(text) > MAX_LABEL_CHARS:
        raise InvalidRequest(
            name, f"{name} has {len(text)} characters; at most {MAX_LABEL_CHARS} are allowed"
        )


def _holder(authorization: bytes | None) -> str:
    """Name the holder of a bearer token by its hash, so that the token does not leak."""
    if authorization is None or not authorization.lower().startswith(_BEARER):
        return ""
    token = authorization[len(_BEARER) :].strip()
    return f"token-{hashlib.sha256(token).hexdigest()[:32]}" if token else ""
