"""PrefixLeaders: of requests that wait with a common uncached prefix, one goes ahead. PURE.

Made anew for each step by core/waiting_queue.py from the prompts that the step computes, or a step
that has not landed: there is no leader that could have gone.
"""

from .req import Req


class PrefixLeaders:
    def __init__(self, tokens: int, page_size: int) -> None:
        """A prefix counts from `tokens` on, in whole pages; 0: nobody waits for anybody."""
        self._tokens = -(-tokens // page_size) * page_size
        self._by_start: dict[int, dict[bytes, list[Req]]] = {}

    def add(self, req: Req) -> None:
        """A piece of its prompt is being computed: what follows kv.landed is not in the tree."""
        assert req.kv is not None
        start = req.kv.landed
        end = start + self._tokens
        if self._tokens and end <= len(req.ids):
            group = req.ids[start:end].tobytes()
            self._by_start.setdefault(start, {}).setdefault(group, []).append(req)

    def include(self, req: Req) -> bool:
        """Would `req` compute again what one of them computes?"""
        for start, groups in self._by_start.items():
            end = start + self._tokens
            if end >= len(req.ids):  # the last token is always computed
                continue
            for leader in groups.get(req.ids[start:end].tobytes(), ()):
                if leader.namespace == req.namespace and leader.ids[:start] == req.ids[:start]:
                    return True
        return False
