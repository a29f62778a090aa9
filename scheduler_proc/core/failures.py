"""The Finish of a request that ends without its complete answer. PURE.

Used by core/scheduler.py and core/queue_limits.py. Statuses are HTTP's.
"""

from ...wire.messages import Finish
from ...wire.sampling import InvalidRequest
from .lora_slots import AdapterError


def failure(status: int, why: str, *, retry_after: int | None = None) -> Finish:
    """`retry_after`: seconds."""
    return Finish("error", message=why, status=status, retry_after=retry_after)


DRAINING = failure(503, "the server is shutting down")
CUT_SHORT = failure(
    503, "the server has shut down before this answer was complete (--drain-timeout)"
)
NO_PAGES = failure(500, "the KV pool did not give the pages that this request was promised")
NOT_FINITE = failure(500, "the model gave no finite probabilities for this request")


def refusal_for(error: InvalidRequest | AdapterError) -> Finish:
    """The Finish of a request that can never be served: 404 for its adapter, else 400."""
    return failure(404 if isinstance(error, AdapterError) else 400, str(error))
