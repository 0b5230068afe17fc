"""Admission policies: which requests are rejected before they cost work (Mooncake v3 section 7).

The unit of load is predicted latency over its SLO; `load_limit` is the highest load accepted.

* none: no request is rejected for its SLO. A request that finds no room waits until its deadline.
* baseline: checks the prefill load at arrival. Without `decode_wait`, the decode instance checks
  its load when the prefill is done; a request that it rejects has been prefilled for nothing.
* early: also checks the decode load at arrival, as it is at that moment. The decode load is then
  one prefill too old, which makes both pools swing in turn (section 7.3).
* predictive: checks the decode load projected to the end of this prefill (section 7.4).
* goodput: admits what adds more effective requests than it costs (`admission.goodput`).
* module:Class: a policy from outside the package (`AdmissionPolicy`, docs/extending.md).

A separate rule (`admission.decode_wait`) decides whether an admitted request then waits for room in
a decode batch; on a server with a batch of its own, the request waits before its prefill. The rule
applies to all policies, which judge a TTFT that includes the wait after the prefill. If the rule is
off, the decode instance checks the load once more, except with the policy none.
Policies book nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Protocol

import msgspec

from moonpool.conductor.admission.context import AdmissionContext
from moonpool.conductor.admission.goodput import decide
from moonpool.conductor.forecast.decode_forecast import Forecast
from moonpool.conductor.instance_table import InstanceTable
from moonpool.conductor.placement.choice import Rejection
from moonpool.conductor.placement.policies import PolicyError, RequestFootprint, guarded
from moonpool.config.tables import Admission
from moonpool.types import Slo

UNLIMITED = Slo(ttft_s=inf, tbt_s=inf)
WAITS_S = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 120.0)
"""Delays at which the projection is evaluated again, to recommend when to retry."""


AdmissionFunction = Callable[[AdmissionContext], Rejection | None]


class AdmissionPolicy(Protocol):
    """An admission policy from outside the package: an object or function to be called.

    A policy returns None to accept the request, the reason as text to reject it with HTTP status
    429, or a `Rejection`. A policy may keep state, but must not modify the context or read a clock.
    """

    def __call__(self, context: AdmissionContext, /) -> Rejection | str | None: ...


class CustomAdmission:
    """Adapts an `AdmissionPolicy` to the built-in policies' interface."""

    def __init__(self, name: str, policy: AdmissionPolicy) -> None:
        self.name = f"the admission policy {name}"
        self.policy = policy

    def __call__(self, context: AdmissionContext) -> Rejection | None:
        """Raises PolicyError."""
        result: object = guarded(self.name, lambda: self.policy(context))
        if result is None or isinstance(result, Rejection):
            return result
        if isinstance(result, str) and result:
            return Rejection(429, "admission_policy", result, WAITS_S[0])
        raise PolicyError(
            f"{self.name} returned {result!r}: it must return None, a reason or a Rejection"
        )


def admit(context: AdmissionContext, policy: AdmissionFunction | None = None) -> Rejection | None:
    """Returns why the placement must not be booked, or None if it may be booked. `policy`: a policy
    from outside the package, or None for the built-in policy that the config names."""
    if context.budget.slo is UNLIMITED:
        return None
    return (policy or ADMISSIONS[context.config.admission])(context)  # type: ignore[index]


def _none(context: AdmissionContext) -> None:
    return None


def _baseline(context: AdmissionContext) -> Rejection | None:
    tail, limit = context.table.ttft_tail, context.config.load_limit
    return _too_late(context, tail, limit)


def _early(context: AdmissionContext) -> Rejection | None:
    late = _baseline(context)
    if late is not None or not _counts_decodes(context):
        return late
    pool, table, limit = _pool(context), context.table, context.config.load_limit
    decoding = table.without_remainders(table.total_decoding, table.total_decoding_context)
    if pool.load(*decoding) <= limit:
        return None
    return _slow_now(context.footprint, pool, limit)


def _predictive(context: AdmissionContext) -> Rejection | None:
    late = _baseline(context)
    if late is not None or not _counts_decodes(context):
        return late
    now, ttft_s, forecast = context.now, context.placement.ttft_s, context.forecast
    pool, limit = _pool(context), context.config.load_limit
    projected = forecast.project(now + ttft_s, now)
    if not context.config.decode_wait:
        # with `decode_wait`, the decode wait has already noted a projection
        forecast.note_projection(now + ttft_s, projected[0])
    if pool.load(*context.table.without_remainders(*projected)) <= limit:
        return None
    return _slow_then(pool, ttft_s, forecast, limit, now)


def _goodput(context: AdmissionContext) -> Rejection | None:
    assert context.expected is not None
    return decide(context, context.expected)


ADMISSIONS: dict[Admission, AdmissionFunction] = {
    "none": _none,
    "baseline": _baseline,
    "early": _early,
    "predictive": _predictive,
    "goodput": _goodput,
}


def _counts_decodes(context: AdmissionContext) -> bool:
    return context.footprint.decodes and context.budget.slo.tbt_s < inf


def _pool(context: AdmissionContext) -> _Pool:
    tokens, row = context.footprint.expected_tokens, context.placement.decoder_row
    return _Pool(context.table, row, tokens, context.budget.slo.tbt_s)


class _Pool(msgspec.Struct, frozen=True):
    """Predicted load of the decode pool as a whole. All decodes are spread so that the instances
    are equally slow, as placement does. This request is added on the chosen instance."""

    table: InstanceTable
    row: int
    own_tokens: int
    slo_tbt_s: float

    def tbt_s(self, batch: float, context_tokens: float) -> float:
        """Mean of the longest tenth of a request's token gaps, by which the SLO is judged."""
        return self._step_s(batch, context_tokens) * self.table.tbt_tail_of(self.row)

    def _step_s(self, batch: float, context_tokens: float) -> float:
        table, row = self.table, self.row
        if table.decodes_alike:
            num = table.num_decodes
            return table.tbt_s(row, batch / num + 1, context_tokens / num + self.own_tokens)
        per_token_s = table.decode_s_per_context_token.item(row)
        own_s = table.decode_s_per_sequence.item(row) + per_token_s * self.own_tokens
        level_s = table.level_tbt_s(batch, context_tokens)
        return max(level_s, table.decode_base_s.item(row)) + own_s

    def memory(self, context_tokens: float) -> float:
        """Share of the engine's own memory that would be used."""
        tokens = context_tokens / self.table.num_decodes + self.own_tokens
        return tokens / self.table.engine_tokens.item(self.row)

    def load(self, batch: float, context_tokens: float) -> float:
        """Predicted latency over its SLO, or the used share of the memory if that is higher: an
        engine without room lets requests wait, which breaks the SLO, too."""
        return max(self.tbt_s(batch, context_tokens) / self.slo_tbt_s, self.memory(context_tokens))

    def numbers(self, batch: float, context_tokens: float, limit: float) -> dict[str, float]:
        """Returns the load as numbers by name, for metrics and JSON."""
        return {
            "predicted_tbt_s": float(self.tbt_s(batch, context_tokens)),
            "limit_tbt_s": self.slo_tbt_s * limit,
            "predicted_decode_load": float(self.load(batch, context_tokens)),
            "limit_decode_load": limit,
            "predicted_decoding": float(batch),
        }

    def describe(self, batch: float, context_tokens: float, limit: float) -> str:
        """Returns the load as text, with the limit that it exceeds."""
        tbt_s = self.tbt_s(batch, context_tokens)
        if tbt_s / self.slo_tbt_s >= self.memory(context_tokens):
            what = f"predicted time between tokens {tbt_s:.3f} s"
            than = f"the SLO of {self.slo_tbt_s:g} s"
        else:
            what = f"{self.memory(context_tokens):.0%} of the engine's memory"
            than = "what there is"
        hopeless = " even on an idle instance: raise the SLO" if self.load(0, 0) > limit else ""
        number = f"the {batch:.3g} answers on {self.table.num_decodes} instances"
        return f"{what} with {number} exceeds {_share(limit)}{than}{hopeless}"


def _too_late(context: AdmissionContext, tail: float, limit: float) -> Rejection | None:
    """`tail` corrects the predicted queueing time only, because the prefill itself takes about as
    long as predicted. A request at the head of its queue is therefore never rejected because of
    `tail`."""
    placement, budget = context.placement, context.budget
    ttft_s = budget.waited_s + placement.ttft_s
    late_s = ttft_s + (tail - 1.0) * placement.queue_s
    slo_s = budget.slo.ttft_s
    if late_s <= slo_s * limit:
        return None
    text = f"predicted TTFT {ttft_s:.2f} s"
    if ttft_s <= slo_s * limit:
        text += f" ({late_s:.2f} s if it is as late as one in ten was lately)"
    text += f" exceeds {_share(limit)}the SLO of {slo_s:g} s"
    status, wait_s = 429, late_s - slo_s * limit
    alone_s = placement.ttft_s - placement.queue_s - placement.decode_wait_s
    if min(alone_s, context.rest_prefill_s) > slo_s * limit:
        text += " even on an idle instance: shorten the prompt or raise the SLO"
        status, wait_s = 422, float("inf")
    return Rejection(
        status,
        "ttft_slo",
        text,
        wait_s,
        {"predicted_ttft_s": ttft_s, "late_ttft_s": late_s, "limit_ttft_s": slo_s * limit}
        | {"predicted_queue_s": placement.queue_s, "predicted_prefill_s": placement.prefill_s},
    )


def _slow_now(footprint: RequestFootprint, pool: _Pool, limit: float) -> Rejection:
    table = pool.table
    batch, context_tokens = table.without_remainders(
        table.total_decoding, table.total_decoding_context
    )
    text = f"{pool.describe(batch, context_tokens, limit)}: that is the load now"
    # Decodes end evenly over the duration of one; the load falls in proportion.
    load, alone = pool.load(batch, context_tokens), pool.load(0, 0)
    excess = (load - limit) / max(load - alone, 1e-9)
    numbers = pool.numbers(batch, context_tokens, limit)
    if alone > limit:
        return Rejection(422, "decode_load", text, float("inf"), numbers)
    return Rejection(429, "decode_load", text, footprint.answer_s * min(excess, 1.0), numbers)


def _slow_then(
    pool: _Pool, ttft_s: float, forecast: Forecast, limit: float, now: float
) -> Rejection:
    keep = pool.table.without_remainders
    projected = keep(*forecast.project(now + ttft_s, now))
    text = (
        f"{pool.describe(*projected, limit)}: that is the load projected to the end of this"
        f" prefill in {ttft_s:.2f} s"
    )
    numbers = pool.numbers(*projected, limit) | {"ahead_s": ttft_s}
    if pool.load(0, 0) > limit:
        return Rejection(422, "decode_load_predicted", text, float("inf"), numbers)
    wait_s = WAITS_S[-1]
    for later_s in WAITS_S:
        if pool.load(*keep(*forecast.project(now + ttft_s + later_s, now))) <= limit:
            wait_s = later_s
            break
    return Rejection(429, "decode_load_predicted", text, wait_s, numbers)


def _share(limit: float) -> str:
    return "" if limit == 1.0 else f"{limit:g} of "
