"""Tally: output of one request so far, for usage and for answers that are not streamed."""

from ...wire.messages import Finish, StrOut


class Tally:
    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.rows = 0
        self.token_ids: list[int] = []
        self.finish: Finish | None = None
        self._texts: list[str] = []

    def add(self, row: StrOut) -> None:
        self.rows += 1
        self.completion_tokens += len(row.token_ids)
        self.cached_tokens = max(self.cached_tokens, row.cached_tokens)
        self.token_ids.extend(row.token_ids)
        self._texts.append(row.text)
        self.finish = row.finish

    @property
    def text(self) -> str:
        if len(self._texts) > 1:
            self._texts = ["".join(self._texts)]
        return self._texts[0] if self._texts else ""

    @property
    def ended(self) -> Finish:
        """How the request ended; only valid after its last row."""
        if self.finish is None:
            raise RuntimeError("the request has not ended yet")
        return self.finish
