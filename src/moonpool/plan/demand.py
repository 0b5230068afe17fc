"""Computes a workload's demand by the cost model, and the candidates at which a search begins.

`prepare` returns one candidate for each mix of hardware, split or mixed, and the sizes that are
worth a try. It raises ConfigError for a plan that no cluster can satisfy. This module simulates
only an endless cache.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from math import ceil, fsum, inf
from typing import Literal

import msgspec

from moonpool.config.tables import Config, ConfigError
from moonpool.distributions import nearest_rank
from moonpool.pages.units import given_percent
from moonpool.plan.candidate import (
    CACHE_STEPS,
    CHUNK_STEPS,
    EVICTIONS,
    SSD_STEPS,
    Candidate,
    NodeKind,
    Priced,
    Steps,
)
from moonpool.plan.trial import WHOLE, Span, Workload
from moonpool.sim.capacity import PromptCache, prompts_of
from moonpool.sim.hardware import calibrated
from moonpool.sim.hardware.build import Hardware, NodeHardware, build_hardware
from moonpool.sim.hardware.model_shapes import is_plain
from moonpool.trace.row import TraceRow
from moonpool.types import Struct

SPAN_SHARE = 1 / 6
LEAST_SPAN_S = 120.0
STAGES_FROM = 0.4
"""If prompts take over this share of the TTFT SLO on an idle instance, two stages are tried."""
MOST_INSTANCES = 4096
LEAST_DURATION_S = 1.0
BURST_INSTANCES = 64
"""If prompts need more instances at once than this, they may wait until first tokens are due."""


class Demand(Struct, frozen=True):
    """The requests in order: arrival, prompt tokens, prompt tokens that an endless cache would hit,
    answer tokens.

    A call of a program arrives when its tools have run, as if earlier calls took no time.
    """

    arrived_s: tuple[float, ...]
    input_tokens: tuple[int, ...]
    hit_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]

    @property
    def duration_s(self) -> float:
        return max(self.arrived_s)

    @property
    def at_once(self) -> bool:
        """Whether the trace is too short to have a rate, or a price per token."""
        return self.duration_s < LEAST_DURATION_S

    @property
    def load_words(self) -> str:
        """The rate of the requests, or their number if they all arrive at once."""
        number = len(self.arrived_s)
        if self.at_once:
            return "one request" if number == 1 else f"{number:,} requests at once"
        return f"{number / self.duration_s:.3g} requests/s"

    @property
    def longest_tokens(self) -> int:
        return max(a + b for a, b in zip(self.input_tokens, self.output_tokens, strict=True))

    @property
    def context_tokens(self) -> float:
        """The mean context of a request half-way through its answer."""
        return fsum(self.input_tokens) / len(self.input_tokens) + self.answer_tokens / 2

    @property
    def answer_tokens(self) -> float:
        return fsum(self.output_tokens) / len(self.output_tokens)


class Need(Struct, frozen=True):
    """The number of instances on one kind of node that the busiest time of the trace needs, by the
    cost model.

    `idle_ttft_s` is the quantile of the TTFT on an idle cluster that belongs to the wanted share
    of requests.
    """

    prefill: int
    decode: int
    idle_ttft_s: float
    idle_tbt_s: float


def demand_of(workload: Workload, block_tokens: int) -> Demand:
    """Returns the demand. Raises ConfigError if neither block size divides the other."""
    rows = workload.rows
    hits = [0] * len(rows)
    if workload.block_tokens:
        cache = PromptCache("lru", None, block_tokens)
        try:
            prompts = prompts_of(rows, workload.block_tokens, block_tokens)
            hits = [cache.serve(prompt) for prompt in prompts]
        except ValueError as error:
            raise ConfigError(str(error)) from None
    return Demand(
        tuple(call_times_s(rows, lambda row: 0.0)),
        tuple(row.input_tokens for row in rows),
        tuple(hits),
        tuple(row.output_tokens for row in rows),
    )


def call_times_s(
    rows: Sequence[TraceRow], answered_s: Callable[[TraceRow], float]
) -> Iterator[float]:
    """Yields the time at which each request arrives if its answers take as long as `answered_s`
    says. A call of a program arrives after the calls that it waits for, and after its tools."""
    ended_s: dict[str, float] = {}
    for row in rows:
        at_s = max((ended_s[name] for name in row.after if name in ended_s), default=None)
        at_s = row.arrived_s if at_s is None else max(row.arrived_s, at_s + row.delay_s)
        if row.call:
            ended_s[row.call] = at_s + answered_s(row)
        yield at_s


def prefill_times_s(demand: Demand, node: NodeHardware) -> list[float]:
    """Returns the prefill time of each request on an idle instance with every possible hit."""
    pairs = zip(demand.input_tokens, demand.hit_tokens, strict=True)
    return [node.estimate.prefill_s(n, min(hit, n - 1)) for n, hit in pairs]


def busiest_span(demand: Demand, work_s: Sequence[float]) -> Span:
    """Returns the span with the most prefill work, with a warm-up of half its length before it. The
    span is SPAN_SHARE of the trace, but at least `LEAST_SPAN_S`; a trace shorter than two such
    spans is returned whole."""
    length_s = max(demand.duration_s * SPAN_SHARE, LEAST_SPAN_S)
    if demand.duration_s < 2 * length_s:
        return WHOLE
    best_s, begin_s = -1.0, 0.0
    step_s = length_s / 8
    for number in range(int((demand.duration_s - length_s) / step_s) + 1):
        begin = number * step_s
        sum_s = fsum(
            work
            for at, work in zip(demand.arrived_s, work_s, strict=True)
            if begin <= at < begin + length_s
        )
        if sum_s > best_s:
            best_s, begin_s = sum_s, begin
    return Span(begin_s, begin_s + length_s, min(length_s / 2, begin_s))


def need_of(
    demand: Demand, span: Span, node: NodeHardware, decoder: NodeHardware, config: Config,
    wanted: float,
) -> Need:  # fmt: skip
    """Returns the need by throughput: the prefill seconds per second, and the least number of
    decode instances whose batches keep the TBT and fit in memory."""
    work_s = prefill_times_s(demand, node)
    end_s = min(span.end_s, demand.duration_s)
    inside = [i for i, at in enumerate(demand.arrived_s) if span.begin_s <= at < end_s]
    length_s = max(end_s - span.begin_s, 1e-9)
    if not inside or fsum(work_s[i] for i in inside) * wanted > BURST_INSTANCES * length_s:
        inside = [i for i, at in enumerate(demand.arrived_s) if span.begin_s <= at <= end_s]
        length_s += config.slo.loosest.ttft_s
    prefill = max(ceil(fsum(work_s[i] for i in inside) / length_s * wanted), 1)
    prefill = min(prefill, MOST_INSTANCES)
    idle_ttft_s = nearest_rank(sorted(work_s), wanted)
    context = demand.context_tokens
    idle_tbt_s = decoder.estimate.decode_step_s(1, round(context))
    decode = _decode_instances(demand, len(inside) / length_s, decoder, config)
    return Need(prefill, decode, idle_ttft_s, idle_tbt_s)


def _decode_instances(
    demand: Demand, rate_rps: float, decoder: NodeHardware, config: Config
) -> int:
    context, answer = demand.context_tokens, demand.answer_tokens
    room = min(decoder.engine_tokens, decoder.num_blocks * config.pool.block_tokens) / context
    most = min(room, config.engine.max_sequences)
    number = 1
    while number < MOST_INSTANCES:
        batch = 1.0
        for _ in range(64):  # Little's law gives the number of sequences in the batch
            step_s = decoder.estimate.decode_step_s(ceil(batch), ceil(batch * context))
            batch = rate_rps / number * answer * step_s
            if step_s > config.slo.loosest.tbt_s or batch > most:
                break
        else:
            return number
        number += 1
    return number


def mixed_chunk_tokens(demand: Demand, node: NodeHardware, config: Config) -> int:
    """Returns the largest chunk with which 16 decodes in the same step still keep the TBT."""
    for chunk in reversed(CHUNK_STEPS):
        chunk_s = node.estimate.prefill_s(chunk, 0) - node.estimate.prefill[0]
        step_s = chunk_s + node.estimate.decode_step_s(16, round(16 * demand.context_tokens))
        if step_s <= config.slo.loosest.tbt_s:
            return chunk
    return CHUNK_STEPS[0]


def check_possible(needs: dict[NodeKind, Need], config: Config, wanted: float) -> None:
    """Raises ConfigError if not even an idle cluster keeps the SLOs."""
    prefilling = [kind for kind in needs if not kind.offloads]
    fastest = min(prefilling, key=lambda kind: needs[kind].idle_ttft_s)
    idle_s = needs[fastest].idle_ttft_s
    if idle_s > config.slo.loosest.ttft_s:
        raise ConfigError(
            f"no cluster keeps the SLOs: for {given_percent(wanted)} of the requests, prefill alone"
            f" takes up to {idle_s:.3g} s on an idle instance of {fastest}, all cache hits"
            f" included, and --slo-ttft is {config.slo.loosest.ttft_s:g} s: raise it, lower"
            " --attainment, or name faster --devices"
        )
    fastest = min(needs, key=lambda kind: needs[kind].idle_tbt_s)
    idle_s = needs[fastest].idle_tbt_s
    if idle_s > config.slo.loosest.tbt_s:
        raise ConfigError(
            f"no cluster keeps the SLOs: a decode step takes {idle_s:.3g} s on an idle"
            f" instance of {fastest}, and --slo-tbt is {config.slo.loosest.tbt_s:g} s: raise it, or"
            " name faster --devices"
        )


Layout = Literal["both", "disaggregated", "colocated"]
FIRST_CHUNK_TOKENS = 2048


class Prepared(Struct, frozen=True):
    """The candidates at which a search begins, and the sizes that it chooses from. `left_out` has
    the reasons why kinds of nodes are left out."""

    base: Config
    demand: Demand
    starts: tuple[Candidate, ...]
    steps: Steps
    layout: Layout
    left_out: tuple[str, ...]
    context_tokens: int  # mean context half-way through an answer
    has_hashes: bool = True  # whether the trace shows equal prefixes

    @property
    def shares_prefixes(self) -> bool:
        return any(self.demand.hit_tokens)


def truth_for(base: Config, kinds: Sequence[NodeKind], cost: str | None) -> Config:
    """Returns `base` with the cost model for these kinds of nodes.

    The cost model is the measured one if the only kind is the measured node, otherwise the
    roofline.
    """
    measured = NodeKind(calibrated.DEVICE, calibrated.NUM_DEVICES)
    if cost is None:
        alone = set(kinds) == {measured} and base.hardware.shape == calibrated.SHAPE
        alone = alone and is_plain(base.model)
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
    """Returns the start of the search. Raises ConfigError if no cluster could keep the SLOs."""
    demand = demand_of(workload, base.pool.block_tokens)
    steps = steps_for(demand, base)
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
    within = [kind for kind in needs if needs[kind].idle_tbt_s <= base.slo.loosest.tbt_s]
    first_one = Candidate(
        kinds[0], kinds[0], 1, 1, 0, steps.caches[-1], FIRST_CHUNK_TOKENS,
        base.conductor.placement, base.conductor.admission, steps.evictions[0],
        prefill_stages=base.engine.pipeline_parallel_size,
    )  # fmt: skip
    starts: list[Candidate] = []
    change = msgspec.structs.replace
    for kind, need in needs.items():
        if kind.offloads:
            continue
        for stages in _stages(need, base, kind):
            own = change(first_one, kind=kind, decode_kind=kind, prefill_stages=stages)
            if layout != "colocated":
                starts += [
                    change(own, decode_kind=one, prefill=need.prefill, decode=needs[one].decode)
                    for one in within
                ]
            if layout != "disaggregated" and kind in within:
                chunk = mixed_chunk_tokens(demand, able[kind].mixed, base)
                number = need.prefill + need.decode
                starts.append(change(own, prefill=0, decode=0, mixed=number, chunk_tokens=chunk))
    context = round(demand.context_tokens)
    starts = _within_power(starts, priced)
    return Prepared(
        base,
        demand,
        tuple(starts),
        steps,
        layout,
        left_out,
        max(context, 1),
        workload.block_tokens > 0,
    )


def _within_power(starts: Sequence[Candidate], priced: Priced) -> list[Candidate]:
    """Returns the starts that draw at most the allowed power. One mixed instance fewer may suffice,
    because the cost model's numbers for prompts and for answers were each rounded up. Raises
    ConfigError if no start is left."""
    if not starts:
        raise ConfigError(
            "none of these devices keeps both SLOs on mixed instances: use --layout both"
        )
    within, least = [], starts[0]
    for start in starts:
        fewer = msgspec.structs.replace(start, mixed=max(start.mixed - 1, 0))
        tried = [start, fewer] if fewer.mixed else [start]
        within += [one for one in tried if priced.usd_per_h(one) < inf][:1]
        least = min(least, *tried, key=priced.power_w)
    if within:
        return within
    raise ConfigError(
        f"no cluster of these devices serves the load within {priced.max_power_w / 1e3:g} kW:"
        f" by the cost model, the least is {priced.words(least)}, which may draw"
        f" {priced.power_w(least) / 1e3:.4g} kW; give --max-power as much or more, or name other"
        " --devices"
    )


def _stages(need: Need, base: Config, kind: NodeKind) -> list[int]:
    """Returns the numbers of stages of a prefill instance that are worth a try."""
    own = base.engine.pipeline_parallel_size
    late = need.idle_ttft_s > STAGES_FROM * base.slo.loosest.ttft_s
    free = base.hardware.nodes_per_prefill == 1 and base.engine.num_shards == 1
    possible = free and own == 1 and not base.hardware.cost.endswith(".json")
    if need.idle_ttft_s > 2 * base.slo.loosest.ttft_s:
        return []
    return [own, 2] if late and possible else [own]


def steps_for(demand: Demand, base: Config) -> Steps:
    """Returns the sizes to try: pools from the longest request up to the size that the whole trace
    fills, and, if requests share prefixes, eviction policies and SSD sizes. Raises ConfigError."""
    block = base.pool.block_tokens
    least = -(-demand.longest_tokens // block) * block
    shared = any(demand.hit_tokens)
    distinct = sum(demand.input_tokens) - sum(demand.hit_tokens) + sum(demand.output_tokens)
    caches = [cache for cache in CACHE_STEPS if cache >= least]
    if not caches:
        raise ConfigError(
            f"the longest request has {least:,} tokens, more than the largest cache that is"
            f" tried, {CACHE_STEPS[-1]:,} an instance: leave such requests out of the trace"
        )
    enough = sum(cache < distinct for cache in caches)
    own = base.pool.eviction
    evictions = (own, *(name for name in EVICTIONS if name != own))
    return Steps(
        tuple(caches[: enough + 1]),
        SSD_STEPS if shared else (0,),
        evictions if shared else (own,),
    )


def _able_kinds(
    workload: Workload, base: Config, kinds: Sequence[NodeKind], priced: Priced, demand: Demand
) -> tuple[dict[NodeKind, Hardware], tuple[str, ...]]:
    able: dict[NodeKind, Hardware] = {}
    reasons = Reasons()
    for kind in kinds:
        candidate = Candidate(kind, kind, 1, 1, 0, CACHE_STEPS[-1], FIRST_CHUNK_TOKENS)
        config = candidate.config(base)
        workload.catalogue.device(kind.device)
        if kind.offloads:
            workload.catalogue.device(kind.attention_device)
        alone = Candidate(
            kind, kind, 0, int(kind.offloads), int(not kind.offloads), CACHE_STEPS[0], 0
        )
        power_w = priced.power_w(alone)
        if priced.max_power_w < inf and not power_w:
            raise ConfigError(
                f"--max-power needs the power of {kind}: give power_w of its devices in --catalogue"
            )
        if priced.usd_per_h(alone) == inf:
            reasons.too_large(
                kind,
                f"{priced.words(alone)} may draw {power_w / 1e3:.4g} kW, more than the"
                f" {priced.max_power_w / 1e3:g} kW of --max-power",
            )
            continue
        try:
            hardware = build_hardware(config, workload.profile, workload.catalogue)
        except ConfigError as error:
            reasons.too_small(kind, str(error))
            continue
        if demand.longest_tokens > hardware.largest_request_tokens:
            reasons.too_small(
                kind,
                f"{kind} hold {hardware.largest_request_tokens:,} tokens of KVCache besides the"
                f" model, and the longest request has {demand.longest_tokens:,}; use more devices",
            )
            continue
        able[kind] = hardware
    if not able:
        raise ConfigError("; ".join(reasons.lines()))
    return able, tuple(reasons.lines())


_NUMBER = re.compile(r"\d[\d.,]*")


class Reasons:
    """Collects the reasons why kinds of nodes are left out. Kinds that differ only in size share
    one of `lines`, with the reason of the size that is nearest to being usable. Callers note the
    kinds in rising size."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str, str], list[tuple[NodeKind, str]]] = {}

    def too_small(self, kind: NodeKind, why: str) -> None:
        """Notes a kind that would suffice with more devices."""
        self._alike(kind, why).append((kind, why))

    def too_large(self, kind: NodeKind, why: str) -> None:
        """Notes a kind that would suffice with fewer devices."""
        self._alike(kind, why).insert(0, (kind, why))

    def lines(self) -> Iterator[str]:
        for *others, (_, why) in self._found.values():
            sizes = sorted(kind.num_devices for kind, _ in others)
            yield f"{why} (nodes of {_listed(sizes)}, too)" if sizes else why

    def _alike(self, kind: NodeKind, why: str) -> list[tuple[NodeKind, str]]:
        key = kind.device, str(kind.num_attention) + kind.attention_device, _NUMBER.sub("", why)
        return self._found.setdefault(key, [])


def _listed(sizes: list[int]) -> str:
    *most, last = map(str, sizes)
    return f"{', '.join(most)} and {last}" if most else last
