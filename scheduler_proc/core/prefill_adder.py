"""PrefillAdder: adds prompt tokens to a step, within the token budget and the pool. PURE.

Made anew for each step by core/scheduler.py. A new request joins when the step's reserve has room
for it; if not, `victims_for` finds the running requests that it would have to replace.
"""

from bisect import bisect_left
from collections.abc import Collection, Sequence

from .admission import Admission
from .kv_cache import KVCache
from .req import Req
from .reserve import Reserve
from .retraction import preemptable_by
from .step_budget import Budget


class PrefillAdder:
    def __init__(
        self,
        kv: KVCache,
        admission: Admission,
        running: Collection[Req],
        budget: Budget,
    ) -> None:
        self._kv = kv
        self._admission = admission
        self._running = running  # a live view: the scheduler adds admitted requests
        self._left = budget.tokens
        self._chunking = budget.cuts
        self._reserve: Reserve | None = None
        self._whole_only = False  # a prompt that would be cut does not join now
        self.added: list[tuple[Req, int]] = []  # request, its prompt tokens in this step
        self.was_cut = False  # the last one added has more prompt than this step computes
        self.failed: Req | None = None  # the request that was refused pages after make_room

    def whole_ones_first(self, chunked: Req, step: int) -> bool:
        """In every other step, let prompts that need not be cut go before the rest of a long one.

        So short prompts do not wait until a long one is done, which still gets half of the steps.
        """
        assert chunked.kv is not None
        self._whole_only = step % 2 == 1 and len(chunked.ids) - chunked.kv.computed > self._left
        return self._whole_only

    def continue_chunked(self, req: Req) -> bool:
        """Add the next chunk of a partly computed prompt; False if none of it fits."""
        self._whole_only = False
        return self.failed is None and self._take(req)

    def has_budget_for(self, req: Req) -> bool:
        """Whether to try it: its first chunk fits the budget, or whole prompts behind it may."""
        return self._whole_only or self._first_piece(req) > 0

    def _first_piece(self, req: Req) -> int:
        cached = self._kv.match(req).num_pages * self._kv.page_size
        return self._piece(cached, len(req.ids))

    def add_new(self, req: Req) -> bool:
        """Admit a waiting request with its first chunk, or leave it untouched and return False."""
        if self.failed or not self._kv.rows.available or self._first_piece(req) <= 0:
            return False
        if self._reserve is None:
            self._reserve = self._admission.reserve(self._kv, self._running)
        match = self._kv.match(req)
        if not self._reserve.take(req, match):
            return False
        self._kv.admit(req, match)
        if not self._take(req):
            self._kv.release(req)
            return False
        return True

    def victims_for(self, req: Req, threshold: int, first: Sequence[Req] = ()) -> list[Req]:
        """The fewest running requests to retract so that `req` fits; empty if all are not enough.

        Includes all of `first`, and no other request that gets prompt tokens in this step.
        """
        if self.failed or self._first_piece(req) <= 0:
            return []
        settled = {*first, *(other for other, _ in self.added)}
        lesser = preemptable_by(req, self._running, threshold)
        lesser = [*first, *(other for other in lesser if other not in settled)]
        least = max(1, len(first))

        def fits_without(count: int) -> bool:
            gone = set(lesser[:count])
            rest = [other for other in self._running if other not in gone]
            with self._kv.as_if_released(lesser[:count]):
                return self._admission.reserve(self._kv, rest).take(req, self._kv.match(req))

        if not lesser or not fits_without(len(lesser)):
            return []
        self._reserve = None  # it counts the victims, which are about to be retracted
        return lesser[: least + bisect_left(range(least, len(lesser)), True, key=fits_without)]

    def _take(self, req: Req) -> bool:
        kv = req.kv
        assert kv is not None
        tokens = self._piece(kv.computed, len(req.ids))
        if tokens <= 0 or not self._kv.make_room(self._kv.missing_pages(kv, tokens)):
            return False
        if not self._kv.grow(kv, tokens):
            self.failed = req
            return False
        self._left -= tokens
        self.added.append((req, tokens))
        self.was_cut = kv.computed + tokens < len(req.ids)
        return True

    def _piece(self, computed: int, total: int) -> int:
        """Tokens to compute now: all that are left, or up to a page boundary within the budget."""
        if total - computed <= self._left:
            return total - computed
        if self._whole_only:
            return 0
        if self._chunking:
            return (computed + self._left) // self._kv.page_size * self._kv.page_size - computed
        return 0 if self.added else total - computed  # uncut: an oversize prompt goes alone
