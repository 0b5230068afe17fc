"""The input of an admission policy: a request, its placement, and its expected gain and cost."""

from __future__ import annotations

import msgspec

from moonpool.conductor.forecast.decode_forecast import Forecast
from moonpool.conductor.instance_table import InstanceTable
from moonpool.conductor.placement.choice import Placement
from moonpool.conductor.placement.policies import RequestFootprint
from moonpool.config.tables import ConductorConfig
from moonpool.types import Slo

LEAST_TTFT_CHANCE = 0.5
"""Below this chance to meet the TTFT SLO a request is rejected: a longer queue serves no more
requests in time than a shorter one."""
LEAST_TTFT_CHANCE_ALONE = 0.85
"""The limit for requests that need not wait for a decode batch: their prompts wait only for other
prompts, so the queue soon grows as deep as this permits. Both limits apply to a TTFT of which at
least `WAITING_SHARE` is waiting. If the request waits for no other work, a rejection leaves the
instance idle, so the limits fall with the share of waiting."""
WAITING_SHARE = 0.5
LEAST_CHANCE = 0.02
"""Requests with a smaller chance to meet both SLOs are rejected, whatever they cost."""
REST_CHANCE = 0.05
"""The chance to meet the TTFT SLO when the costs measured at rest predict it, but the costs learned
since do not. If the request waits for no other work and harms no other request, a rejection would
free nothing."""


class ExpectedGoodput(msgspec.Struct, frozen=True):
    """The gain and the cost of admitting one request, in effective requests."""

    worth: float  # the request's chance to meet both SLOs if no prefill waited
    ttft_chance: float
    tbt_chance: float
    harm: float  # how much the request lowers the chances of the answers in its batch
    prefill_cost: float
    decode_cost: float
    step_s: float  # predicted step time with the request in the batch
    wait_s: float = 0.0  # time from the end of the prefill until the decode can begin
    waiting_share: float = 1.0  # share of the predicted TTFT that the request waits in queues
    delay: float = 0.0  # effective requests lost because they wait for this request's prefill
    rest_chance: float = 0.0  # `REST_CHANCE` if that constant applies, else 0

    @property
    def least_ttft_chance(self) -> float:
        least = LEAST_TTFT_CHANCE if self.wait_s else LEAST_TTFT_CHANCE_ALONE
        waiting = min(self.waiting_share / WAITING_SHARE, 1.0)
        return max(least * waiting, LEAST_CHANCE)

    @property
    def best_ttft_chance(self) -> float:
        return max(self.ttft_chance, self.rest_chance)

    @property
    def gain(self) -> float:
        return self.best_ttft_chance * self.tbt_chance

    @property
    def cost(self) -> float:
        # At full load, the price of decode and the harm to others count one loss twice: for future
        # requests and for present ones. The price of prefill and the delay of other requests also
        # count one loss twice.
        return max(self.prefill_cost, self.delay) + max(self.harm, self.decode_cost)

    @property
    def adds_more(self) -> bool:
        """Whether the request adds more effective requests than it costs. Prices compare requests
        by their worth, because the queue is the same for all of them."""
        if (
            self.gain < LEAST_CHANCE
            or self.gain < self.harm + self.delay
            or self.best_ttft_chance < self.least_ttft_chance
        ):
            return False
        return self.worth >= self.prefill_cost + self.decode_cost


class SloBudget(msgspec.Struct, frozen=True):
    """A request's SLO, and how long it has already waited. A level of `slo` that nobody has stated
    is infinite. `assumed`: the same SLO with assumed levels in place of infinite ones, as a measure
    of load, or None if that is `slo` itself.
    """

    slo: Slo
    waited_s: float
    assumed: Slo | None = None

    @property
    def yardstick(self) -> Slo:
        """The TTFT and TBT SLO of the request, stated or assumed."""
        return self.slo if self.assumed is None else self.assumed


class AdmissionContext(msgspec.Struct, frozen=True):
    """The input of an admission policy: the request and its placement, which is not booked yet."""

    footprint: RequestFootprint
    placement: Placement  # includes the predicted `ttft_s`, `tbt_s`, `queue_s` and `prefill_s`
    budget: SloBudget
    table: InstanceTable
    forecast: Forecast
    config: ConductorConfig
    now: float
    expected: ExpectedGoodput | None = None  # only set for the policy "goodput"

    @property
    def rest_prefill_s(self) -> float:
        """The shortest time of the prefill on an idle instance. If even that exceeds the SLO,
        waiting cannot help."""
        table, placement = self.table, self.placement
        rest_s = table.rest_prefill_s(self.footprint.num_tokens, float(placement.hit_tokens))
        return float(rest_s[table.prefills].min(initial=placement.prefill_s))
