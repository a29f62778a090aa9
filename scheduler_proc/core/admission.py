"""Admission: how much of the answers still to come is reserved, learned from retractions.

Owned by core/scheduler.py, which reports each step's decodes; makes the Reserve of a step in which
a request may start. PURE.
"""

from collections.abc import Collection, Sequence

from ...wire.scheduling_config import SchedulingConfig
from .kv_cache import KVCache
from .new_token_ratio import NewTokenRatio
from .req import Req
from .reserve import Reserve


class Admission:
    def __init__(self, settings: SchedulingConfig) -> None:
        self.ratio = NewTokenRatio(settings.schedule_conservativeness)

    def reserve(self, kv: KVCache, running: Collection[Req]) -> Reserve:
        return Reserve(kv, running, self.ratio.value)

    def after_decodes(self, decodes: Sequence[Req], *, retracted: bool) -> None:
        """Adapt the ratio after a step's decodes got their pages, with or without a retraction."""
        if retracted:
            self.ratio.learn(decodes)
        elif decodes:
            self.ratio.decay()
