"""Valid request ids of clients: `rid` in bodies, X-Request-Id in headers. PURE."""

import re

from ...wire.sampling import InvalidRequest
from ..limits import MAX_REQUEST_ID_CHARS, REQUEST_ID_PATTERN

_IN_BODY = re.compile(REQUEST_ID_PATTERN)
_IN_HEADER = re.compile(REQUEST_ID_PATTERN.encode())


def check_rid(rid: str) -> None:
    if not _IN_BODY.fullmatch(rid):
        raise InvalidRequest(
            "rid", f"rid must be 1 to {MAX_REQUEST_ID_CHARS} of the characters A-Z a-z 0-9 . _ : -"
        )


def is_request_id(value: bytes) -> bool:
    return _IN_HEADER.fullmatch(value) is not None
