"""What a workload asks of a cluster, by the cost model alone: where a search begins, what no
cluster can do, and which part of the trace is the busiest. Nothing is simulated but an endless
cache."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, fsum

from moonpool.config import Config, ConfigError
from moonpool.plan.candidate import CHUNK_STEPS, NodeKind
from moonpool.plan.trial import WHOLE, Span, Workload
from moonpool.sim.capacity import PromptCache, prompts_of
from moonpool.sim.hardware import NodeHardware
from moonpool.types import Struct

SPAN_SHARE = 1 / 6
LEAST_SPAN_S = 120.0
MOST_INSTANCES = 4096


class Demand(Struct, frozen=True):
    """Of each request in order: when it comes, its prompt, how much of it an endless cache would
    have, and its answer."""

    arrived_s: tuple[float, ...]
    input_tokens: tuple[int, ...]
    hit_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]

    @property
    def duration_s(self) -> float:
        return self.arrived_s[-1]

    @property
    def longest_tokens(self) -> int:
        return max(a + b for a, b in zip(self.input_tokens, self.output_tokens, strict=True))

    @property
    def context_tokens(self) -> float:
        """Mean context of a request half-way through its answer."""
        return fsum(self.input_tokens) / len(self.input_tokens) + self.answer_tokens / 2

    @property
    def answer_tokens(self) -> float:
        return fsum(self.output_tokens) / len(self.output_tokens)


class Need(Struct, frozen=True):
    """Of one kind of node, at the busiest time: instances by the cost model; `idle_ttft_s` is that
    of the request at which the wanted share is just met on an idle cluster."""

    prefill: int
    decode: int
    idle_ttft_s: float
    idle_tbt_s: float


def demand_of(workload: Workload, block_tokens: int) -> Demand:
    """Raises ConfigError where the two block sizes do not fit."""
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
        tuple(row.arrived_s for row in rows),
        tuple(row.input_tokens for row in rows),
        tuple(hits),
        tuple(row.output_tokens for row in rows),
    )


def prefill_times_s(demand: Demand, node: NodeHardware) -> list[float]:
    """Of each request, on an idle instance with all that could be cached."""
    pairs = zip(demand.input_tokens, demand.hit_tokens, strict=True)
    return [node.belief.prefill_s(n, min(hit, n - 1)) for n, hit in pairs]


def busiest_span(demand: Demand, work_s: Sequence[float]) -> Span:
    """The part with most prefill work, a sixth of the trace, and half of that before it."""
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
    """By throughput: prefill seconds per second, and the smallest decode pool whose batches stay
    within the TBT and its memory."""
    work_s = prefill_times_s(demand, node)
    end_s = min(span.end_s, demand.duration_s)
    inside = [i for i, at in enumerate(demand.arrived_s) if span.begin_s <= at < end_s]
    length_s = max(end_s - span.begin_s, 1e-9)
    prefill = max(ceil(fsum(work_s[i] for i in inside) / length_s * wanted), 1)
    ranked = sorted(work_s)
    idle_ttft_s = ranked[min(ceil(wanted * len(ranked)), len(ranked)) - 1]
    context = demand.context_tokens
    idle_tbt_s = decoder.belief.decode_step_s(1, round(context))
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
        for _ in range(64):  # Little's law: as many run as arrive while one is answered
            step_s = decoder.belief.decode_step_s(ceil(batch), ceil(batch * context))
            batch = rate_rps / number * answer * step_s
            if step_s > config.slo.tbt_s or batch > most:
                break
        else:
            return number
        number += 1
    return number


def mixed_chunk_tokens(demand: Demand, node: NodeHardware, config: Config) -> int:
    """The largest chunk beside which a usual batch of decodes still keeps the TBT."""
    for chunk in reversed(CHUNK_STEPS):
        chunk_s = node.belief.prefill_s(chunk, 0) - node.belief.prefill[0]
        step_s = chunk_s + node.belief.decode_step_s(16, round(16 * demand.context_tokens))
        if step_s <= config.slo.tbt_s:
            return chunk
    return CHUNK_STEPS[0]


def check_possible(needs: dict[NodeKind, Need], config: Config, wanted: float) -> None:
    """Raises ConfigError where not even an idle cluster keeps the SLOs."""
    prefilling = [kind for kind in needs if not kind.offloads]
    fastest = min(prefilling, key=lambda kind: needs[kind].idle_ttft_s)
    idle_s = needs[fastest].idle_ttft_s
    if idle_s > config.slo.ttft_s:
        raise ConfigError(
            f"no cluster can: for {wanted:.0%} of the requests, prefill alone takes up to"
            f" {idle_s:.3g} s on an idle instance of {fastest}, all cache hits counted, and"
            f" --slo-ttft is {config.slo.ttft_s:g} s: raise it, lower --attainment, or name faster"
            " --devices"
        )
    fastest = min(needs, key=lambda kind: needs[kind].idle_tbt_s)
    idle_s = needs[fastest].idle_tbt_s
    if idle_s > config.slo.tbt_s:
        raise ConfigError(
            f"no cluster can: a decode step takes {idle_s:.3g} s on an idle instance of {fastest},"
            f" and --slo-tbt is {config.slo.tbt_s:g} s: raise it, or name faster --devices"
        )
