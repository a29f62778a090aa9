"""RowsOut: the rows of the scheduler's next message to the detokenizer. PURE.

Owned by core/scheduler.py. The first row of a request carries its StreamOpen.
"""

from ...wire.messages import BatchTokenIDOut, Finish, StreamOpen, TokenIDOut
from .req import Req

PROMPT_TAIL = 8  # prompt ids sent to the detokenizer, for the spacing of the first word


class RowsOut:
    def __init__(self) -> None:
        self._rows: list[TokenIDOut] = []

    def __len__(self) -> int:
        return len(self._rows)

    def speak_of(self, rid: int) -> bool:
        """Whether a row of `rid` is unsent, such as the end of a request failed in planning."""
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
        """Add the only row of a request that was not accepted."""
        self._rows.append(TokenIDOut(rid, finish=finish, opened=StreamOpen(b"")))

    def take(self) -> list[BatchTokenIDOut]:
        rows, self._rows = self._rows, []
        return [BatchTokenIDOut(rows)] if rows else []
