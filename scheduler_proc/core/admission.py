"""How careful admission is: a share of the answers' limits that decays and learns.

Owned by core/scheduler.py, which tells it how steps went; makes a Reserve for each step in which
something may start. PURE.
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
        """Pages for a step's decodes were found, with or without a retraction."""
        if retracted:
            self.ratio.learn(decodes)
        elif decodes:
            self.ratio.decay()
