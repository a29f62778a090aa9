"""Exceptions raised by the client modules. PURE."""


class ClientError(Exception):
    """Base of all errors about a server. Wrong arguments raise TypeError or ValueError instead."""


class ServerGone(ClientError):
    """There is no server, or the connection was lost. A later call may succeed."""


class RequestTimeout(ClientError, TimeoutError):
    """The server sent nothing within a timeout; the request was aborted."""


class RequestRefused(ClientError):
    """The server refused a request or failed it in the middle of an answer.

    `status` is an HTTP status: 400 invalid (`param` names the field), 404 unknown adapter, 408
    timed out, 409 conflict, 413 too large, 500 internal error, 503 unavailable (retry after
    `retry_after` seconds).
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.retry_after = retry_after
