"""The input of an admission policy."""

from __future__ import annotations

import msgspec

from moonpool.conductor.admission.expected_goodput import ExpectedGoodput
from moonpool.conductor.forecast.decode_forecast import Forecast
from moonpool.conductor.instance_table import InstanceTable
from moonpool.conductor.placement.choice import Placement
from moonpool.conductor.placement.policies import RequestFootprint
from moonpool.config.tables import ConductorConfig
from moonpool.types import Slo


class SloBudget(msgspec.Struct, frozen=True):
    """A request's SLO, and how long it has already waited. `slo` is infinite if nobody has stated
    one. `assumed` is the SLO that is assumed instead, as a measure of load; None if all levels were
    stated.
    """

    slo: Slo
    waited_s: float
    assumed: Slo | None = None

    @property
    def yardstick(self) -> Slo:
        """The SLO, stated or assumed."""
        return self.slo if self.assumed is None else self.assumed


class AdmissionContext(msgspec.Struct, frozen=True):
    """The input of an admission policy: the request and its placement, which is not booked yet."""

    footprint: RequestFootprint
    placement: Placement  # with the predicted `ttft_s`, `tbt_s`, `queue_s` and `prefill_s`
    budget: SloBudget
    table: InstanceTable
    forecast: Forecast
    config: ConductorConfig
    now: float
    expected: ExpectedGoodput | None = None  # for the policy "goodput" only

    @property
    def rest_prefill_s(self) -> float:
        """The shortest time of the prefill on an idle instance. If even that exceeds the SLO,
        waiting cannot help."""
        table, placement = self.table, self.placement
        rest_s = table.rest_prefill_s(self.footprint.num_tokens, float(placement.hit_tokens))
        return float(rest_s[table.prefills].min(initial=placement.prefill_s))
