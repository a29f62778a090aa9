"""What can go wrong for a client, as exceptions with the facts in attributes. PURE."""


class ClientError(Exception):
    """Every error that this package raises about a server; wrong calls raise TypeError or such."""


class ServerGone(ClientError):
    """No server there, or it went away; what was in flight is lost. A later call may work."""


class RequestTimeout(ClientError, TimeoutError):
    """The server is there but said nothing for too long; the request was aborted."""


class RequestRefused(ClientError):
    """The server's no, before or in the middle of an answer.

    `status` is an HTTP status: 400 wrong (`param` names the field), 404 no such adapter, 408 took
    too long, 409 in the way of something else, 413 too large, 500 broken inside, 503 not now:
    `retry_after` says in how many seconds it may go better.
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
