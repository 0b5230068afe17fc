"""Measures the engine in front of it for a second or two, for the cost model's fit.

Owns which steps are worth measuring. Runs before any request is served: it writes into blocks from
number 0 on, and takes cached contexts for granted, since attention costs the same over any bytes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import count
from typing import Literal

from moonpool.cost.fitted import DecodeSample, FittedCost, PrefillSample, fit_cost
from moonpool.engine.runner import Engine
from moonpool.engine.step import Draw, SequenceStep
from moonpool.types import RequestId, SamplingParams, Struct

# (new tokens, cached tokens) and (batch, context of each), cheap ones first: the time may run out.
PREFILLS = (
    (16, 0),
    (64, 0),
    (64, 512),
    (256, 0),
    (256, 1024),
    (512, 0),
    (128, 4096),
    (512, 1536),
    (512, 7680),
)
DECODES = ((1, 64), (1, 1024), (4, 64), (4, 1024), (16, 64), (8, 2048), (32, 256), (16, 2048))
ALWAYS = 3  # of each kind, however slow: enough to tell the terms apart
REPEATS = 3
Point = tuple[Literal["prefill", "decode"], int, int, int]  # kind, batch, new, context of each
_GREEDY = Draw(SamplingParams(temperature=0.0), (), ())


class Sample(Struct, frozen=True):
    """One kind of step, timed. context_tokens: what was in the KVCache before, over the batch."""

    kind: Literal["prefill", "decode"]
    new_tokens: int
    context_tokens: int
    batch: int
    seconds: float


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
    return fit_cost(prefills, decodes)


def measure_samples(engine: Engine, budget_s: float = 1.5) -> list[Sample]:
    """Best of a few runs of each step; half the time for prefills, half for decodes.

    A model so slow that little fits has `ALWAYS` steps of each kind measured.
    """
    _run(engine, _step(engine, 1, 1, 0))  # touches all weights once
    prefills: list[Point] = [("prefill", 1, new, cached) for new, cached in PREFILLS]
    decodes: list[Point] = [("decode", batch, 1, context) for batch, context in DECODES]
    return [
        *_within(engine, budget_s / 2, prefills),
        *_within(engine, budget_s / 2, decodes),
    ]


def _within(engine: Engine, budget_s: float, points: Iterable[Point]) -> Iterator[Sample]:
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


def _fitted(engine: Engine, point: Point) -> Point:
    """The point cut to what the model's context and the arena hold."""
    kind, batch, new, context = point
    most = min(engine.spec.max_positions, engine.num_blocks * engine.layout.block_tokens)
    new = min(new, most)
    return kind, batch, new, min(context, most - new)


def _step(engine: Engine, batch: int, new: int, context: int) -> list[SequenceStep]:
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


def _best_s(engine: Engine, step: list[SequenceStep], ends_s: float) -> float:
    best_s = _run(engine, step)
    for _ in range(REPEATS - 1):
        if time.perf_counter() + best_s > ends_s:
            break
        best_s = min(best_s, _run(engine, step))
    return best_s


def _run(engine: Engine, step: list[SequenceStep]) -> float:
    return engine.step(step).seconds
