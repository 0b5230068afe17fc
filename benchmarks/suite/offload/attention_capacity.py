"""`moonpool bench attention --capacity`: TBT by the number of simultaneous requests, and by the
number of attention workers with their KVCache.

An instance's own memory holds N requests. An attention worker's memory holds `holds` times as many
requests, like the memory of an attention device. There is one curve with only the workers' memory,
and one that also uses the instance's memory. Each curve ends where the memory is full. A point is
the faster of one batch and two batches that take turns. The same rounds measure the instance's own
full memory, because a machine's speed drifts more than the two differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

import torch

from benchmarks.suite.offload.attention import BLOCK_TOKENS
from moonpool.cores import usable_cores
from moonpool.types import Struct
from moonpool_engine.attention_offload.remote_ops import RemoteOps
from moonpool_engine.engine.builtin import LoadedModel, open_model
from moonpool_engine.engine.ops import empty_cache
from moonpool_engine.engine.runner import Engine, choose_split_ops, make_layout
from moonpool_engine.engine.staggered import MIN_SEQUENCES
from moonpool_lab.profiling.attention_group import (
    Decodes,
    OffloadTimes,
    median_times,
    open_attention_group,
    timed_step,
)

POINTS = 4  # measured numbers of requests, for each memory of the size of the instance's own


class AttentionCapacityPoint(Struct, frozen=True):
    """`slowest_s`: the worst of the repeats, `tbt_s` their median. In that step, `model_s` is the
    model worker's busy time, and `attention_s` each attention worker's. `in_turns`: whether the
    faster way was two batches in turns. `other_s` is the time of the slower way; 0 means that so
    few requests are always one batch. `at_home`: a share of the attention is in `model_s`.
    `limit_s`: the step time with the instance's own full memory, measured in the same rounds."""

    requests: int
    tbt_s: float
    slowest_s: float
    model_s: float = 0.0
    attention_s: float = 0.0
    in_turns: bool = False
    at_home: bool = False
    other_s: float = 0.0
    limit_s: float = 0.0

    @property
    def times(self) -> float:
        """Step times with the instance's own full memory, in the same rounds."""
        return self.tbt_s / self.limit_s

    @property
    def rest_s(self) -> float:
        """The time of messages and of waiting for a core; if both sides work at the same time, the
        time in which neither is busy."""
        return max(self.tbt_s - self.bound_s, 0.0)

    @property
    def bound_s(self) -> float:
        """The part of the time that faster messages would not save."""
        busy_s = (self.model_s, self.attention_s)
        return max(busy_s) if self.in_turns or self.at_home else sum(busy_s)


class AttentionCapacityCurve(Struct, frozen=True):
    """`at_home`: the instance's own memory is in use."""

    workers: int
    at_home: bool
    points: tuple[AttentionCapacityPoint, ...]

    @property
    def words(self) -> str:
        if not self.workers:
            return "own memory"
        name = "1 attention worker" if self.workers == 1 else f"{self.workers} attention workers"
        return f"{name} and own memory" if self.at_home else name

    @property
    def capacity(self) -> int:
        return self.points[-1].requests


class CapacityResult(Struct, frozen=True):
    model: str
    context_tokens: int
    requests_each: int
    holds: int
    cores: int
    curves: tuple[AttentionCapacityCurve, ...]
    slo_tbt_s: float = 0.0  # 0 means that no call asked about it

    @property
    def limit_s(self) -> float:
        """The time between tokens when the instance's own memory is full."""
        return median(point.limit_s for curve in self.curves for point in curve.points)

    def within(self, curve: AttentionCapacityCurve) -> int:
        """Returns the most requests whose time between tokens is at most that of the full own
        memory beside them."""
        return max((point.requests for point in curve.points if point.times <= 1.0), default=0)

    def promised(self, curve: AttentionCapacityCurve) -> int:
        """Returns the most requests within the SLO, up to as many as memory holds."""
        kept = [point.requests for point in curve.points if point.tbt_s <= self.slo_tbt_s]
        return max(kept, default=0)


def bench_attention_capacity(
    model_name: str,
    group_sizes: Sequence[int],
    requests_each: int,
    context: int,
    repeats: int,
    dtype: str,
    holds: int = 1,
    slo_tbt_s: float = 0.0,
) -> CapacityResult:
    """Measures without attention workers first; a worker's memory holds `holds` times
    `requests_each`. Raises AttentionError or ValueError."""
    torch.set_num_threads(1)
    model = open_model(model_name, dtype)
    layout = make_layout(model, BLOCK_TOKENS, choose_split_ops())
    own_blocks = requests_each * layout.blocks_for(context + 1)
    local = Engine(model, choose_split_ops(), empty_cache(layout, own_blocks))
    own = _Own(model, local, Decodes(requests_each, context, (own_blocks,), BLOCK_TOKENS))
    kinds = [
        (0, True),
        *((workers, home) for workers in sorted(group_sizes) for home in (False, True)),
    ]
    curves = [_curve(own, workers, home, holds, repeats) for workers, home in kinds]
    cores = usable_cores()
    sizes = (context, requests_each, holds, cores)
    return CapacityResult(model_name, *sizes, tuple(curves), slo_tbt_s)


class _Own(NamedTuple):
    """The instance without attention workers, and the batch that fills its memory."""

    model: LoadedModel
    engine: Engine
    full: Decodes


def _curve(
    own: _Own, workers: int, at_home: bool, holds: int, repeats: int
) -> AttentionCapacityCurve:
    model, layout, engine = own.model, own.engine.layout, own.engine
    full, home = own.full.batch, engine.num_blocks if at_home else 0
    each = holds * engine.num_blocks
    memories = (each,) * workers + ((home,) if home else ())
    most = full * (holds * workers + at_home)
    steps = range(1, POINTS * holds + 1)
    counts = {max(full * step // POINTS, 1) * len(memories) for step in steps}
    batches = [
        Decodes(count, own.full.context, memories, BLOCK_TOKENS)
        for count in sorted({count for count in counts if count <= most} | {most})
    ]
    if not workers:
        return AttentionCapacityCurve(
            0, True, tuple(_point(own, batch, repeats) for batch in batches)
        )
    with open_attention_group(model, layout, workers, each, own_blocks=home) as made:
        ways = (made.engine(), made.engine(staggered=True))
        points = tuple(_remote_point(own, ways, batch, repeats, at_home) for batch in batches)
        return AttentionCapacityCurve(workers, at_home, points)


def _point(own: _Own, batch: Decodes, repeats: int) -> AttentionCapacityPoint:
    batch.seconds(own.engine)  # touches what is cold
    rounds = [(batch.seconds(own.engine), own.full.seconds(own.engine)) for _ in range(repeats)]
    times, limits = zip(*rounds, strict=True)
    return AttentionCapacityPoint(batch.batch, median(times), max(times), limit_s=median(limits))


def _remote_point(
    own: _Own,
    engines: Sequence[tuple[Engine, RemoteOps]],
    batch: Decodes,
    repeats: int,
    at_home: bool,
) -> AttentionCapacityPoint:
    """Measures the first engine as one batch, and the second as two if the batch is large."""
    ways = engines if batch.batch >= MIN_SEQUENCES else engines[:1]
    timed: list[list[OffloadTimes]] = [[] for _ in ways]
    limits: list[float] = []
    for turn in range(repeats + 1):
        limits.append(own.full.seconds(own.engine))
        for kept, (engine, ops) in zip(timed, ways, strict=True):
            way = timed_step(engine, ops, batch)
            if turn:  # the first touches what is cold
                kept.append(way)
    middles = [median_times(kept) for kept in timed]
    best = min(range(len(ways)), key=lambda way: middles[way].step_s)
    middle = middles[best]
    return AttentionCapacityPoint(
        requests=batch.batch,
        tbt_s=middle.step_s,
        slowest_s=max(way.step_s for way in timed[best]),
        model_s=middle.model_s,
        attention_s=middle.attention_s,
        in_turns=best == 1,
        at_home=at_home,
        other_s=middles[1 - best].step_s if len(ways) == 2 else 0.0,
        limit_s=median(limits[1:]),
    )


def capacity_lines(result: CapacityResult) -> Iterator[str]:
    yield (
        f"{result.model}, {result.context_tokens} tokens a request, {result.requests_each} of them"
        f" in the instance's own memory, {result.holds} times as many in an attention worker's,"
        f" {result.cores} cores"
    )
    yield (
        f"{'memory':<34}  requests  time between tokens (ms)  slowest  of a full memory's own"
        "  model  attention   rest"
        "  batches (ms of the other way)"
    )
    for curve in result.curves:
        for point in curve.points:
            parts = (
                f" {point.model_s * 1e3:>6.2f} {point.attention_s * 1e3:>10.2f}"
                f" {point.rest_s * 1e3:>6.2f}  {'two' if point.in_turns else 'one'}"
                + (f" ({point.other_s * 1e3:.2f})" if point.other_s else "")
            )
            yield (
                f"{curve.words:<34} {point.requests:>9} {point.tbt_s * 1e3:>25.2f}"
                f" {point.slowest_s * 1e3:>8.2f} {point.times:>23.2f}"
                f"{parts if curve.workers else ''}"
            )
    for curve in result.curves[1:]:
        yield from _verdict(result, curve)
    if result.slo_tbt_s:
        kept = (f"{curve.words} {result.promised(curve)}" for curve in result.curves)
        yield f"requests at once within {result.slo_tbt_s * 1e3:g} ms: {', '.join(kept)}"


def _verdict(result: CapacityResult, curve: AttentionCapacityCurve) -> Iterator[str]:
    """Says what all attention workers cost, and which part of this faster messages would not
    save."""
    full, limit_s = curve.points[-1], curve.points[-1].limit_s
    for point in curve.points[:-1]:
        if point.requests == 2 * result.requests_each:
            yield f"{curve.words}: twice the requests take {point.times:.2f} times as long"
    yield (
        f"{curve.words}: room for {curve.capacity / result.requests_each:.0f}"
        f" times the requests, all of them at {full.times:.2f} times the"
        f" {limit_s * 1e3:.1f} ms of {result.requests_each} without, and"
        f" {result.within(curve)} within these"
    )
    side = "the model's part" if full.model_s > full.attention_s else "attention"
    overlap = full.in_turns or full.at_home
    order = "at once" if overlap else "one after the other"
    crowded = f"; {curve.workers} workers share {result.cores} cores"
    yield (
        f"    {order}, {side} leading, both sides take {full.bound_s / limit_s:.2f} times"
        f" that time{crowded if 1 + curve.workers > result.cores else ''}"
    )
