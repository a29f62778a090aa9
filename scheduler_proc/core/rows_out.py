"""The rows that go to the detokenizer with the scheduler's next message. PURE.

Owned by core/scheduler.py. The first row of a request carries what the detokenizer must know of it.
"""

from ...wire.messages import BatchTokenIDOut, Finish, StreamOpen, TokenIDOut
from .req import Req

PROMPT_TAIL = 8  # prompt ids that the detokenizer sees, for the spacing of the first word


class RowsOut:
    def __init__(self) -> None:
        self._rows: list[TokenIDOut] = []

    def __len__(self) -> int:
        return len(self._rows)

    def speak_of(self, rid: int) -> bool:
        """Something of it has not been told yet: its end, where it came while planning."""
        return any(row.rid == rid for row in self._rows)

    def add(self, req: Req, token_ids: tuple[int, ...], finish: Finish | None) -> None:
        opened = None
        if not req.announced:
            req.announced = True
            tail = req.ids[max(0, req.prompt_len - PROMPT_TAIL) : req.prompt_len]
            opened = StreamOpen(
                tail.tobytes(),
                req.sampling.stop,
                req.sampling.skip_special_tokens,
                req.sampling.no_stop_trim,
                req.sampling.min_new_tokens,
            )
        self._rows.append(TokenIDOut(req.rid, token_ids, finish, req.cached_tokens, opened))

    def refuse(self, rid: int, finish: Finish) -> None:
        """The only row of a request that was never taken in."""
        self._rows.append(TokenIDOut(rid, finish=finish, opened=StreamOpen(b"")))

    def take(self) -> list[BatchTokenIDOut]:
        rows, self._rows = self._rows, []
        return [BatchTokenIDOut(rows)] if rows else []
