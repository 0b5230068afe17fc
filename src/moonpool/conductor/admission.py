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
    late = _too_late(placement, promise, fleet.ttft_tail, config.load_limit)
    if late is not None or config.admission == "baseline" or not demand.decodes:
        return late
    pool = _Pool(fleet, placement.decoder_row, demand.expected_tokens, promise.slo.tbt_s)
    if config.admission == "early":
        if pool.load(fleet.total_decoding, fleet.total_decoding_context) <= config.load_limit:
            return None
        return _slow_now(demand, pool, config.load_limit)
    at_s = now + placement.ttft_s
    batch, context_tokens = forecast.project(at_s, now)
    forecast.note_projection(at_s, batch)
    if pool.load(batch, context_tokens) <= config.load_limit:
        return None
    return _slow_then(pool, placement.ttft_s, forecast, config.load_limit, now)


class _Pool(msgspec.Struct, frozen=True):
    """The decode pool as one: all answers spread over its instances so that they are equally slow,
    which is what placement does, and this request with them on the one that was chosen."""

    fleet: Fleet
    row: int
    own_tokens: int
    promised_s: float

    def tbt_s(self, batch: float, context_tokens: float) -> float:
        """Of the longest tenth of an answer's gaps, which is what the promise is judged by."""
        return self._step_s(batch, context_tokens) * self.fleet.tbt_tail_of(self.row)

    def _step_s(self, batch: float, context_tokens: float) -> float:
        fleet = self.fleet
        if fleet.decodes_alike:
            num = fleet.num_decodes
            return fleet.tbt_s(self.row, batch / num + 1, context_tokens / num + self.own_tokens)
        own_s = fleet.f.item(self.row) + fleet.g.item(self.row) * self.own_tokens
        return max(fleet.level_tbt_s(batch, context_tokens), fleet.e.item(self.row)) + own_s

    def memory(self, context_tokens: float) -> float:
        """Share of the engine's own memory that would be taken."""
        tokens = context_tokens / self.fleet.num_decodes + self.own_tokens
        return tokens / self.fleet.engine_tokens.item(self.row)

    def load(self, batch: float, context_tokens: float) -> float:
        """Predicted over promised latency, or memory taken over what there is: an engine without
        room lets answers wait, and breaks the promise too."""
        return max(self.tbt_s(batch, context_tokens) / self.promised_s, self.memory(context_tokens))

    def numbers(self, batch: float, context_tokens: float, limit: float) -> dict[str, float]:
        """The same for machines."""
        return {
            "predicted_tbt_s": float(self.tbt_s(batch, context_tokens)),
            "limit_tbt_s": self.promised_s * limit,
            "predicted_decode_load": float(self.load(batch, context_tokens)),
            "limit_decode_load": limit,
            "predicted_decoding": float(batch),
        }

    def describe(self, batch: float, context_tokens: float, limit: float) -> str:
        """The load in words, and what it exceeds."""
        tbt_s = self.tbt_s(batch, context_tokens)
        if tbt_s / self.promised_s >= self.memory(context_tokens):
            what = f"predicted time between tokens {tbt_s:.3f} s"
            than = f"the SLO of {self.promised_s:g} s"
        else:
            what = f"{self.memory(context_tokens):.0%} of the engine's memory"
            than = "what there is"
        hopeless = " even on an idle instance: raise the SLO" if self.load(0, 0) > limit else ""
        number = f"the {batch:.3g} answers on {self.fleet.num_decodes} instances"
        return f"{what} with {number} exceeds {_share(limit)}{than}{hopeless}"


def _too_late(
    placement: Placement, promise: Promise, tail: float, limit: float
) -> Rejection | None:
    """Queues are what turns out longer than predicted: whom nobody is before, no `tail` refuses."""
    ttft_s = promise.waited_s + placement.ttft_s
    late_s = ttft_s + (tail - 1.0) * placement.queue_s
    promised_s = promise.slo.ttft_s
    if late_s <= promised_s * limit:
        return None
    text = f"predicted TTFT {ttft_s:.2f} s"
    if ttft_s <= promised_s * limit:
        text += f" ({late_s:.2f} s where it is as late as one in ten was lately)"
    text += f" exceeds {_share(limit)}the SLO of {promised_s:g} s"
    if placement.ttft_s - placement.queue_s > promised_s * limit:
        text += " even on an idle instance: shorten the prompt or raise the SLO"
    return Rejection(
        429,
        "ttft_slo",
        text,
        late_s - promised_s * limit,
        {"predicted_ttft_s": ttft_s, "late_ttft_s": late_s, "limit_ttft_s": promised_s * limit}
        | {"predicted_queue_s": placement.queue_s, "predicted_prefill_s": placement.prefill_s},
    )


def _slow_now(demand: Demand, pool: _Pool, limit: float) -> Rejection:
    batch, context_tokens = pool.fleet.total_decoding, pool.fleet.total_decoding_context
    text = f"{pool.describe(batch, context_tokens, limit)}: that is the load now"
    # Answers end evenly over the time that one takes; the load falls in proportion.
    load, alone = pool.load(batch, context_tokens), pool.load(0, 0)
    excess = (load - limit) / max(load - alone, 1e-9)
    numbers = pool.numbers(batch, context_tokens, limit)
    return Rejection(429, "decode_load", text, demand.answer_s * min(excess, 1.0), numbers)


def _slow_then(
    pool: _Pool, ttft_s: float, forecast: Forecast, limit: float, now: float
) -> Rejection:
    projected = forecast.project(now + ttft_s, now)
    text = (
        f"{pool.describe(*projected, limit)}: that is the load projected to the end of this"
        f" prefill in {ttft_s:.2f} s"
    )
    wait_s = WAITS_S[-1]
    if pool.load(0, 0) <= limit:
        for later_s in WAITS_S:
            if pool.load(*forecast.project(now + ttft_s + later_s, now)) <= limit:
                wait_s = later_s
                break
    numbers = pool.numbers(*projected, limit) | {"ahead_s": ttft_s}
    return Rejection(429, "decode_load_predicted", text, wait_s, numbers)


def _share(limit: float) -> str:
    return "" if limit == 1.0 else f"{limit:g} of "
