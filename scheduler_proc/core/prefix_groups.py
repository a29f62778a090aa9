"""PrefixLeaders: of requests that wait with a common uncached prefix, one goes ahead. PURE.

Made anew for each step by core/waiting_queue.py from the prompts that the step computes, or a step
that has not landed: there is no leader that could have gone.
"""

from hashlib import blake2b

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

    def held_from(self, req: Req) -> int | None:
        """From which token on it would compute what one of them computes; None: nowhere."""
        for start, groups in self._by_start.items():
            end = start + self._tokens
            if end >= len(req.ids):  # the last token is always computed
                continue
            for leader in groups.get(req.ids[start:end].tobytes(), ()):
                if leader.namespace == req.namespace and leader.ids[:start] == req.ids[:start]:
                    return start
        return None


def prefix_digest(req: Req, tokens: int) -> bytes:
    """What prompts with the same first `tokens` have in common; empty where there are no more."""
    if not tokens or len(req.ids) <= tokens:
        return b""
    digest = blake2b(req.namespace.encode(), digest_size=16)
    digest.update(b"\0")
    digest.update(req.ids[:tokens].tobytes())
    return digest.digest()
