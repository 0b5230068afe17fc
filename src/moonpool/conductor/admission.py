"""Which requests are turned away before they cost anything (Mooncake v3 section 7).

The unit of load is predicted over promised latency, and `load_limit` is where it ends.

* none: no SLO refuses anything; only lack of room or instances does, and deadlines.
* baseline: the prefill load at arrival. The decode load is looked at when the prefill is done, by
  the decode instance itself; what it refuses then has been prefilled for nothing.
* early: also the decode load at arrival, as it is then. It is read one prefill too early, which
  makes both pools swing in turn (section 7.3).
* predictive: the decode load projected to the instant this prefill will end (section 7.4).

The decode instance's own check stays on in all but the first. Pure functions; nothing is booked.
"""

from __future__ import annotations

import msgspec

from moonpool.conductor.decode_forecast import Forecast
from moonpool.conductor.fleet import Fleet
from moonpool.conductor.placement import Placement, Rejection
from moonpool.conductor.policies import Demand
from moonpool.config import ConductorConfig
from moonpool.types import Slo

UNLIMITED = Slo(ttft_s=float("inf"), tbt_s=float("inf"))
WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 120.0)
"""Times at which a projection is looked at again, to say when to come back."""


class Promise(msgspec.Struct, frozen=True):
    """What was promised to a request, and how long it has waited already."""

    slo: Slo
    waited_s: float


def admit(
    demand: Demand,
    placement: Placement,
    promise: Promise,
    fleet: Fleet,
    forecast: Forecast,
    config: ConductorConfig,
    now: float,
) -> Rejection | None:
    """Why the placement must not be booked; None if it may."""
    if config.admission == "none" or promise.slo is UNLIMITED:
        return None
    late = _too_late(placement, promise, config.load_limit)
    if late is not None or config.admission == "baseline" or not demand.decodes:
        return late
    pool = _Pool(fleet, placement.decoder_row, demand.expected_tokens)
    if config.admission == "early":
        tbt_s = pool.tbt_s(fleet.total_decoding, fleet.total_decoding_context)
        if tbt_s <= promise.slo.tbt_s * config.load_limit:
            return None
        return _slow_now(demand, promise.slo, pool, tbt_s, config.load_limit)
    at_s = now + placement.ttft_s
    batch, context_tokens = forecast.project(at_s, now)
    forecast.note_projection(at_s, batch)
    tbt_s = pool.tbt_s(batch, context_tokens)
    if tbt_s <= promise.slo.tbt_s * config.load_limit:
        return None
    return _slow_then(promise.slo, pool, tbt_s, placement.ttft_s, forecast, config, now)


class _Pool(msgspec.Struct, frozen=True):
    """The decode pool as its mean: all answers spread evenly over its instances, on the kind of
    instance that was chosen, and this request with them."""

    fleet: Fleet
    row: int
    own_tokens: int

    def tbt_s(self, batch: float, context_tokens: float) -> float:
        num = self.fleet.num_decodes
        return self.fleet.tbt_s(self.row, batch / num + 1, context_tokens / num + self.own_tokens)

    @property
    def alone_s(self) -> float:
        return self.fleet.tbt_s(self.row, 1, self.own_tokens)


def _too_late(placement: Placement, promise: Promise, limit: float) -> Rejection | None:
    ttft_s = promise.waited_s + placement.ttft_s
    promised_s = promise.slo.ttft_s
    if ttft_s <= promised_s * limit:
        return None
    text = f"predicted TTFT {ttft_s:.2f} s exceeds {_share(limit)}the SLO of {promised_s:g} s"
    if placement.ttft_s - placement.queue_s > promised_s * limit:
        text += " even on an idle instance: shorten the prompt or raise the SLO"
    return Rejection(429, "ttft_slo", text, ttft_s - promised_s * limit)


def _slow_now(demand: Demand, slo: Slo, pool: _Pool, tbt_s: float, limit: float) -> Rejection:
    batch = pool.fleet.total_decoding
    text = (
        f"predicted time between tokens {tbt_s:.3f} s with the {batch} answers that decode now on"
        f" {pool.fleet.num_decodes} instances exceeds {_share(limit)}the SLO of {slo.tbt_s:g} s"
    )
    if pool.alone_s > slo.tbt_s * limit:
        text += _HOPELESS
    # Answers end evenly over the time that one takes; the load falls in proportion.
    excess = (tbt_s - slo.tbt_s * limit) / max(tbt_s - pool.alone_s, 1e-9)
    return Rejection(429, "decode_load", text, demand.answer_s * min(excess, 1.0))


def _slow_then(
    slo: Slo,
    pool: _Pool,
    tbt_s: float,
    ttft_s: float,
    forecast: Forecast,
    config: ConductorConfig,
    now: float,
) -> Rejection:
    limit_s = slo.tbt_s * config.load_limit
    batch = forecast.project(now + ttft_s, now)[0]
    text = (
        f"predicted time between tokens {tbt_s:.3f} s with the {batch:.1f} answers expected to"
        f" decode on {pool.fleet.num_decodes} instances in {ttft_s:.2f} s, when this prefill ends,"
        f" exceeds {_share(config.load_limit)}the SLO of {slo.tbt_s:g} s"
    )
    wait_s = WAITS_S[-1]
    if pool.alone_s > limit_s:
        text += _HOPELESS
    else:
        for later_s in WAITS_S:
            if pool.tbt_s(*forecast.project(now + ttft_s + later_s, now)) <= limit_s:
                wait_s = later_s
                break
    return Rejection(429, "decode_load_predicted", text, wait_s)


_HOPELESS = " even on an idle instance: raise the SLO"


def _share(limit: float) -> str:
    return "" if limit == 1.0 else f"{limit:g} of "
