"""Error answers of the HTTP door in OpenAI's nested shape, and their mapping from exceptions.

Used by the handlers and by the routing in `http`. Paths and tracebacks must not enter a message.
"""

from collections.abc import Sequence

import msgspec

from ...wire.messages import Finish
from ...wire.sampling import InvalidRequest
from ..errors import Refused, listed, quoted
from ..limits import MAX_ERROR_CHARS

INTERNAL_ERROR = "internal error; the server's log has the details"

Headers = tuple[tuple[str, str], ...]

_TYPES = {
    400: "invalid_request_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    431: "invalid_request_error",
}
_CODES = {
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    408: "timeout",
    409: "conflict",
    413: "request_too_large",
    415: "unsupported_media_type",
    431: "headers_too_large",
    500: "internal_error",
    503: "unavailable",
}


class ErrorDetail(msgspec.Struct, frozen=True):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    error: ErrorDetail


class ClientGone(Exception):
    """The client left or stopped reading; no answer can be sent."""


class ApiError(Exception):
    """An answer other than 200, ready to render."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Headers = (),
    ) -> None:
        message = message[:MAX_ERROR_CHARS]
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.body = ErrorBody(
            ErrorDetail(
                message, _TYPES.get(status, "server_error"), param, code or _CODES.get(status)
            )
        )


def model_not_found(model: str, there: Sequence[str]) -> ApiError:
    return ApiError(
        404,
        f"there is no model {quoted(model)} here; there are: {listed(there)}",
        param="model",
        code="model_not_found",
    )


def as_api_error(error: Exception) -> ApiError:
    """Convert an exception to the client's error; an unexpected one becomes a bare 500."""
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            return ApiError(400, error.message, param=error.param, code=error.code)
        case Refused():
            return ApiError(error.status, error.message, headers=retry_after(error))
        case _:
            return ApiError(500, INTERNAL_ERROR)


def of_finish(finish: Finish) -> ApiError:
    """Return the error for a request that ended with `finish.reason == "error"`."""
    return as_api_error(Refused.of(finish))


def retry_after(refused: Refused) -> Headers:
    seconds = refused.retry_after
    return () if seconds is None else (("retry-after", str(seconds)),)
