"""From a workload, SLOs and kinds of nodes to where a search begins: one candidate for each mix of
hardware, colocated or not. What cannot be is said here, before anything is simulated."""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum
from typing import Literal

import msgspec

from moonpool.config import Config, ConfigError
from moonpool.cost import calibrated
from moonpool.plan.candidate import CACHE_STEPS, Candidate, NodeKind, Priced
from moonpool.plan.demand import (
    Demand,
    Need,
    busiest_span,
    check_possible,
    demand_of,
    mixed_chunk_tokens,
    need_of,
    prefill_times_s,
)
from moonpool.plan.trial import WHOLE, Span, Workload
from moonpool.sim.hardware import Hardware, build_hardware
from moonpool.types import Struct

Layout = Literal["both", "disaggregated", "colocated"]
FIRST_CHUNK_TOKENS = 2048
FIRST_CACHE_TOKENS = 3_000_000


class Prepared(Struct, frozen=True):
    """`span_runs`: the share of a whole trace that simulating `span` takes. `left_out`: kinds that
    cannot hold the model or a request, and why."""

    base: Config
    starts: tuple[Candidate, ...]
    span: Span
    span_runs: float
    least_cache_tokens: int
    left_out: tuple[str, ...]
    context_tokens: int  # mean, of a request half-way through its answer


def truth_for(base: Config, kinds: Sequence[NodeKind], cost: str | None) -> Config:
    """`base` with the cost model by which these kinds are compared: the measured one if there is
    only the node that it was measured on."""
    measured = NodeKind(calibrated.DEVICE, calibrated.NUM_DEVICES)
    if cost is None:
        alone = set(kinds) == {measured} and base.hardware.shape == calibrated.SHAPE
        cost = calibrated.NAME if alone else "roofline"
    return msgspec.structs.replace(base, hardware=msgspec.structs.replace(base.hardware, cost=cost))


def prepare(
    workload: Workload,
    base: Config,
    kinds: Sequence[NodeKind],
    priced: Priced,
    wanted: float,
    layout: Layout = "both",
) -> Prepared:
    """Raises ConfigError: nothing that can be bought could keep the SLOs."""
    demand = demand_of(workload, base.pool.block_tokens)
    able, left_out = _able_kinds(workload, base, kinds, priced, demand)
    first = next((node for kind, node in able.items() if not kind.offloads), None)
    if first is None:
        raise ConfigError(
            f"{', '.join(str(kind) for kind in able)} only decode: name --devices that prefill, too"
        )
    span = busiest_span(demand, prefill_times_s(demand, first.prefill))
    needs = {
        kind: need_of(demand, span, node.prefill, node.decode, base, wanted)
        for kind, node in able.items()
    }
    check_possible(needs, base, wanted)
    within = [kind for kind in needs if _can_decode(needs[kind], base)]
    starts: list[Candidate] = []
    for kind, need in needs.items():
        if need.idle_ttft_s > base.slo.ttft_s or kind.offloads:
            continue
        if layout != "colocated":
            starts += [_disaggregated(kind, other, needs) for other in within]
        if layout != "disaggregated" and kind in within:
            chunk = mixed_chunk_tokens(demand, able[kind].mixed, base)
            mixed = need.prefill + need.decode
            starts.append(Candidate(kind, kind, 0, 0, mixed, FIRST_CACHE_TOKENS, chunk))
    least = -(-demand.longest_tokens // base.pool.block_tokens) * base.pool.block_tokens
    starts = [_with_room(start, least) for start in starts]
    runs, context = _span_runs(demand, span), round(demand.context_tokens)
    return Prepared(base, tuple(starts), span, runs, least, left_out, max(context, 1))


def _able_kinds(
    workload: Workload, base: Config, kinds: Sequence[NodeKind], priced: Priced, demand: Demand
) -> tuple[dict[NodeKind, Hardware], tuple[str, ...]]:
    able: dict[NodeKind, Hardware] = {}
    reasons: list[str] = []
    for kind in kinds:
        candidate = Candidate(kind, kind, 1, 1, 0, CACHE_STEPS[-1], FIRST_CHUNK_TOKENS)
        config = candidate.config(base)
        workload.catalogue.device(kind.device)
        if kind.offloads:
            workload.catalogue.device(kind.attention_device)
        priced.usd_per_h(candidate)
        try:
            hardware = build_hardware(config, workload.profile, workload.catalogue)
        except ConfigError as error:
            reasons.append(str(error))
            continue
        if demand.longest_tokens > hardware.largest_request_tokens:
            reasons.append(
                f"{kind} hold {hardware.largest_request_tokens:,} tokens of KVCache beside the"
                f" model, and the longest request has {demand.longest_tokens:,}; use more devices"
            )
            continue
        able[kind] = hardware
    if not able:
        raise ConfigError("; ".join(reasons))
    return able, tuple(reasons)


def _can_decode(need: Need, base: Config) -> bool:
    return need.idle_tbt_s <= base.slo.tbt_s


def _disaggregated(kind: NodeKind, decode_kind: NodeKind, needs: dict[NodeKind, Need]) -> Candidate:
    prefill, decode = needs[kind].prefill, needs[decode_kind].decode
    return Candidate(kind, decode_kind, prefill, decode, 0, FIRST_CACHE_TOKENS, FIRST_CHUNK_TOKENS)


def _with_room(start: Candidate, least_tokens: int) -> Candidate:
    """With a cache that takes the longest request."""
    cache = next((c for c in CACHE_STEPS if c >= max(least_tokens, start.cache_tokens)), 0)
    if not cache:
        raise ConfigError(
            f"the longest request has {least_tokens:,} tokens, more than the largest cache that is"
            f" tried, {CACHE_STEPS[-1]:,} an instance: leave such requests out of the trace"
        )
    return msgspec.structs.replace(start, cache_tokens=cache)


def _span_runs(demand: Demand, span: Span) -> float:
    if span == WHOLE:
        return 1.0
    begin_s = span.begin_s - span.warm_up_s
    inside = fsum(begin_s <= at < span.end_s for at in demand.arrived_s)
    return inside / len(demand.arrived_s)
