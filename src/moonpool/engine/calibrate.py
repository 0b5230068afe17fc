"""Measures the engine in front of it for a second or two, for the cost model's fit.

Owns which steps are worth measuring. Runs before any request is served: it writes into blocks from
number 0 on, and takes cached contexts for granted, since attention costs the same over any bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Literal, Protocol

import msgspec

from moonpool.cost.fitted import (
    DecodeSample,
    FittedCost,
    MixedSample,
    PrefillSample,
    fit_cost,
)
from moonpool.cost.tiles import find_tile, tile_points
from moonpool.engine.spec import ModelSpec
from moonpool.engine.step import Draw, SequenceStep, StepResult
from moonpool.kvcache.layout import BlockLayout
from moonpool.types import RequestId, SamplingParams, Struct

# (new tokens, cached tokens) and (batch, context of each), cheap ones first: the time may run out.
PREFILLS = (
    (16, 0),
    (64, 0),
    (64, 512),
    (32, 0),
    (256, 0),
    (256, 1024),
    (512, 0),
    (128, 4096),
    (512, 1536),
    (512, 7680),
)
DECODES = ((1, 64), (1, 1024), (4, 64), (4, 1024), (16, 64), (8, 2048), (32, 256), (16, 2048))
# A chunk's new and cached tokens; batch and context of each of the decodes beside it. None so small
# that the decodes ride for less than the arithmetic of their rows: those that serve are larger.
MIXED = ((64, 0, 16, 64), (64, 0, 16, 1024), (32, 0, 8, 256), (64, 512, 16, 256), (256, 0, 32, 512))
CURVE = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
ALWAYS = 3  # of each kind, however slow: enough to tell the terms apart
REPEATS = 3
Kind = Literal["prefill", "decode", "mixed", "curve"]
Point = tuple[Kind, int, int, int]  # kind, batch, new, context of each
_GREEDY = Draw(SamplingParams(temperature=0.0), (), ())


class Measured(Protocol):
    """What is asked of an engine here, be it one process or several stages."""

    spec: ModelSpec
    layout: BlockLayout
    num_blocks: int
    ops_name: str

    def step(self, sequences: Sequence[SequenceStep]) -> StepResult: ...


class Sample(Struct, frozen=True):
    """One kind of step, timed. context_tokens: what was in the KVCache before, over the batch. A
    mixed step is one chunk, of which these speak, and `batch` decodes with contexts of their own.
    A sample of the curve says what a chunk of some size takes, and is not part of the fit."""

    kind: Kind
    new_tokens: int
    context_tokens: int
    batch: int
    seconds: float
    decode_context_tokens: int = 0


def fit_samples(samples: Iterable[Sample]) -> FittedCost:
    """The cost model that these measurements speak for."""
    samples = list(samples)
    prefills = [
        PrefillSample(
            num_tokens=s.new_tokens + s.context_tokens,
            cached_tokens=s.context_tokens,
            seconds=s.seconds,
        )
        for s in samples
        if s.kind == "prefill"
    ]
    decodes = [
        DecodeSample(batch=s.batch, context_tokens=s.context_tokens, seconds=s.seconds)
        for s in samples
        if s.kind == "decode"
    ]
    alone_s = {(s.new_tokens, s.context_tokens): s.seconds for s in samples if s.kind == "prefill"}
    mixed = [
        MixedSample(
            num_tokens=s.new_tokens + s.context_tokens,
            cached_tokens=s.context_tokens,
            batch=s.batch,
            context_tokens=s.decode_context_tokens,
            seconds=s.seconds,
            chunk_s=alone_s.get((s.new_tokens, s.context_tokens)),
        )
        for s in samples
        if s.kind == "mixed"
    ]
    cost = fit_cost(prefills, decodes, mixed, single_steps=True)
    return msgspec.structs.replace(cost, tile_tokens=find_tile(curve_of(samples)))


def curve_of(samples: Iterable[Sample]) -> dict[int, float]:
    """Seconds of a step by the size of its only chunk, where the curve was measured."""
    return {s.new_tokens: s.seconds for s in samples if s.kind == "curve"}


def measure_samples(engine: Measured, budget_s: float = 1.5) -> list[Sample]:
    """Best of a few runs of each step; two fifths of the time for prefills, as much for decodes,
    the rest for both together.

    A model so slow that little fits has `ALWAYS` steps of each kind measured.
    """
    _run(engine, _step(engine, 1, 1, 0))  # touches all weights once
    prefills: list[Point] = [("prefill", 1, new, cached) for new, cached in PREFILLS]
    decodes: list[Point] = [("decode", batch, 1, context) for batch, context in DECODES]
    return [
        *_within(engine, 0.4 * budget_s, prefills),
        *_within(engine, 0.4 * budget_s, decodes),
        *_mixed_within(engine, 0.2 * budget_s),
    ]


def measure_curve(engine: Measured, budget_s: float, say: Callable[[Sample], None]) -> list[Sample]:
    """The time of a step over the size of its chunk, small ones first, as far as the time goes:
    what tells the machine's tiles and its saturation. `say` hears of each as it is measured."""
    _run(engine, _step(engine, 1, 16, 0))
    points: list[Point] = [("curve", 1, new, 0) for new in sorted({*CURVE, *tile_points()})]
    samples = []
    for sample in _within(engine, budget_s, points):
        say(sample)
        samples.append(sample)
    return samples


def _mixed_within(engine: Measured, budget_s: float) -> Iterator[Sample]:
    ends_s = time.perf_counter() + budget_s
    per_token_s = 0.0
    for i, (new, cached, batch, context) in enumerate(MIXED):
        _, _, new, cached = _fitted(engine, ("mixed", 1, new, cached))
        _, _, _, context = _fitted(engine, ("mixed", 1, 1, context))
        if i >= ALWAYS and time.perf_counter() + per_token_s * (new + batch) > ends_s:
            return
        step = _step(engine, 1, new, cached) + _step(engine, batch, 1, context)
        seconds = _best_s(engine, step, ends_s)
        per_token_s = seconds / (new + batch)
        yield Sample(
            kind="mixed",
            new_tokens=new,
            context_tokens=cached,
            batch=batch,
            decode_context_tokens=batch * context,
            seconds=seconds,
        )


def _within(engine: Measured, budget_s: float, points: Iterable[Point]) -> Iterator[Sample]:
    ends_s = time.perf_counter() + budget_s
    fitting = dict.fromkeys(_fitted(engine, point) for point in points)
    per_token_s = 0.0
    for i, (kind, batch, new, context) in enumerate(fitting):
        if i >= ALWAYS and time.perf_counter() + per_token_s * batch * new > ends_s:
            return
        seconds = _best_s(engine, _step(engine, batch, new, context), ends_s)
        per_token_s = seconds / (batch * new)
        yield Sample(
            kind=kind,
            new_tokens=batch * new,
            context_tokens=batch * context,
            batch=batch,
            seconds=seconds,
        )


def _fitted(engine: Measured, point: Point) -> Point:
    """The point cut to what the model's context and the arena hold."""
    kind, batch, new, context = point
    most = min(engine.spec.max_positions, engine.num_blocks * engine.layout.block_tokens)
    new = min(new, most)
    return kind, batch, new, min(context, most - new)


def _step(engine: Measured, batch: int, new: int, context: int) -> list[SequenceStep]:
    """Sequences in blocks of their own as far as the arena has them, as life has it."""
    blocks = engine.layout.blocks_for(new + context)
    ids = count()
    return [
        SequenceStep(
            request_id=RequestId(f"calibration-{i}"),
            new_token_ids=[(i + 7 * t) % 256 for t in range(new)],
            start=context,
            block_ids=[next(ids) % engine.num_blocks for _ in range(blocks)],
            draw=_GREEDY,
        )
        for i in range(batch)
    ]


def _best_s(engine: Measured, step: list[SequenceStep], ends_s: float) -> float:
    best_s = _run(engine, step)
    for _ in range(REPEATS - 1):
        if time.perf_counter() + best_s > ends_s:
            break
        best_s = min(best_s, _run(engine, step))
    return best_s


def _run(engine: Measured, step: list[SequenceStep]) -> float:
    return engine.step(step).seconds
