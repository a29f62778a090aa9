"""How careful admission is: a share of the limits that decays, or what finished answers predict.

Owned by core/scheduler.py, which tells it how steps and answers went; makes a Reserve for each step
in which something may start. PURE.
"""

from collections.abc import Collection, Sequence
from statistics import NormalDist

from ...wire.messages import Finish
from ...wire.scheduling_config import SchedulingConfig
from .kv_cache import KVCache
from .length_model import LengthModel
from .new_token_ratio import NewTokenRatio
from .req import Req
from .reserve import STARTS, ForecastReserve, RatioReserve, Reserve


class Admission:
    def __init__(self, settings: SchedulingConfig) -> None:
        self.ratio = NewTokenRatio(settings.schedule_conservativeness)
        self._lengths = LengthModel(STARTS) if settings.admission == "quantile" else None
        self._deviations = NormalDist().inv_cdf(1.0 - settings.retraction_risk)

    def reserve(self, kv: KVCache, running: Collection[Req]) -> Reserve:
        """Until enough answers have ended to predict others, the ratio decides."""
        if self._lengths is not None and self._lengths.ready:
            return ForecastReserve(kv, running, self._lengths, self._deviations)
        return RatioReserve(kv, running, self.ratio.value)

    def after_decodes(self, decodes: Sequence[Req], *, retracted: bool) -> None:
        """Pages for a step's decodes were found, with or without a retraction."""
        if retracted:
            self.ratio.learn(decodes)
        elif decodes:
            self.ratio.decay()

    def after_end(self, req: Req, finish: Finish) -> None:
        if self._lengths is not None and req.output_len:
            self._lengths.observe(req.output_len, cut=finish.reason != "stop")
