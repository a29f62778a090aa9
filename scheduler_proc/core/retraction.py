"""Who gives way when running requests need more pages than the pool can give. PURE."""

from collections.abc import Iterable

from .prefill_adder import is_protected
from .req import Req


def choose_victim(running: Iterable[Req]) -> Req | None:
    """The least generated work, newest first; protected ones last; never the only one."""
    reqs = list(running)
    if len(reqs) < 2:
        return None
    return min(reqs, key=lambda req: (is_protected(req), req.output_len, -req.arrival))
