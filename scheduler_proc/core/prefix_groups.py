"""PrefixLeaders: of requests with a common uncached prefix, one computes it and the others wait.

Made anew for each step by core/waiting_queue.py from the prompts in this step and in launched ones
that have not landed, so that no request waits for a leader that has ended. PURE.
"""

from hashlib import blake2b

from .req import Req


class PrefixLeaders:
    def __init__(self, tokens: int, page_size: int) -> None:
        """`tokens`: the shortest prefix to wait for, rounded up to pages; 0: none waits."""
        self._tokens = -(-tokens // page_size) * page_size
        self._by_start: dict[int, dict[bytes, list[Req]]] = {}

    def add(self, req: Req) -> None:
        """Add a request whose prompt is being computed: ids from kv.landed on are not cached."""
        assert req.kv is not None
        start = req.kv.landed
        end = start + self._tokens
        if self._tokens and end <= len(req.ids):
            group = req.ids[start:end].tobytes()
            self._by_start.setdefault(start, {}).setdefault(group, []).append(req)

    def held_from(self, req: Req) -> int | None:
        """The token from which `req` would recompute what a leader computes; None: no such."""
        for start, groups in self._by_start.items():
            end = start + self._tokens
            if end >= len(req.ids):  # the last token is always computed
                continue
            for leader in groups.get(req.ids[start:end].tobytes(), ()):
                if leader.namespace == req.namespace and leader.ids[:start] == req.ids[:start]:
                    return start
        return None


def prefix_digest(req: Req, tokens: int) -> bytes:
    """Digest of the namespace and the first `tokens` ids; empty for prompts that are not longer."""
    if not tokens or len(req.ids) <= tokens:
        return b""
    digest = blake2b(req.namespace.encode(), digest_size=16)
    digest.update(b"\0")
    digest.update(req.ids[:tokens].tobytes())
    return digest.digest()
