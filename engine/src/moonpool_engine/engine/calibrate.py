"""Measures step times of an engine, to fit its cost model.

The calibration runs for seconds before the first request is ever served, and overwrites blocks from
number 0 on. Cached contexts are not computed first, since attention costs the same over any bytes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import count
from math import inf
from typing import Literal, Protocol

import msgspec

from moonpool.cost.fitted import DecodeSample, FittedCost, MixedSample, PrefillSample, fit_cost
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool.types import BlockId, SamplingParams, Struct
from moonpool_engine.engine.spec import ModelSpec
from moonpool_engine.engine.step import StepResult

log = logging.getLogger("moonpool.profile")

# (new tokens, cached tokens) and (batch, context of each), cheap ones first, because the time may
# run out.
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
# New and cached tokens of a chunk; batch and context of the decodes in the step. Smaller chunks are
# left out: there decodes cost less than the arithmetic of their rows, unlike in service.
MIXED = ((64, 0, 16, 64), (64, 0, 16, 1024), (32, 0, 8, 256), (64, 512, 16, 256), (256, 0, 32, 512))
# The kinds for the start of a slow model. Three steps of each kind above would take half a minute.
# The times of mixed steps follow from those of other steps.
BRIEF_PREFILLS = ((4, 0), (32, 0), (32, 256))
SLOW_S = 0.1
"""A model is slow if a prefill of `SLOW_TOKENS` takes longer."""
SLOW_TOKENS = 4
CURVE = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
# number of steps of each kind that are measured even if they are slow, because the fit needs them
ALWAYS = 3
PATIENCE_S = 3.0
"""After this time, only the samples that the fit needs are measured: two prefills and a decode.
Without kernels, one step may take seconds."""
REPEATS = 3
Kind = Literal["prefill", "decode", "mixed", "curve"]
Point = tuple[Kind, int, int, int]  # (kind, batch, new tokens, context of each)
TILES = (128, 64, 32, 16)  # candidate tile sizes in tokens, the largest first
MULTIPLES = (2, 3, 4)
MUCH_FASTER = 0.5
"""If a step takes less than this share of its stored time, another load slowed the measurement."""
WHOLE_TILE = 0.6
"""A token past a tile's end that costs at least this share of a tile pays for all of it. At half,
it would be a token past the end of the next smaller tile."""
_GREEDY = SamplingParams(temperature=0.0)


class MeasuredEngine(Protocol):
    """The part of an engine that is measured: one process or several stages."""

    spec: ModelSpec
    layout: BlockLayout
    num_blocks: int
    ops_name: str

    def step(self, entries: Sequence[StepEntry]) -> StepResult: ...


class StepSample(Struct, frozen=True):
    """The measured time of one step.

    `context_tokens` is the number of cached tokens, summed over the batch. A mixed step is one
    chunk, with `new_tokens` and `context_tokens`, and `batch` decodes with `decode_context_tokens`
    in total. A "curve" sample is the time of a chunk by its size and is not part of the fit.
    """

    kind: Kind
    new_tokens: int
    context_tokens: int
    batch: int
    seconds: float
    decode_context_tokens: int = 0


def fit_samples(samples: Iterable[StepSample]) -> FittedCost:
    """Fits the cost model to the samples."""
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


def curve_of(samples: Iterable[StepSample]) -> dict[int, float]:
    """Seconds of a step by the size of its only chunk, from the "curve" samples."""
    return {s.new_tokens: s.seconds for s in samples if s.kind == "curve"}


def measure_samples(
    engine: MeasuredEngine, budget_s: float = 1.5, thorough: bool = True
) -> list[StepSample]:
    """Measures each step a few times and takes the best time: two fifths of the time are for
    prefills, two fifths for decodes, the rest for mixed steps.

    Measures at least `ALWAYS` steps of each kind, also of a slow model. If not `thorough`, measures
    only a few short steps of a slow model, and the fewest after `PATIENCE_S`.
    """
    _run(engine, _step(engine, 1, 1, 0))  # touches all weights once before measuring
    slow_s = 0.0 if thorough else _run(engine, _step(engine, 1, SLOW_TOKENS, 0))
    brief = slow_s > SLOW_S
    if brief:
        log.info("a step takes %.2g s: measuring a few short ones", slow_s)
    least, patient_s = (1, time.perf_counter() + PATIENCE_S) if brief else (ALWAYS, inf)
    chunks = BRIEF_PREFILLS if brief else PREFILLS
    prefills: list[Point] = [("prefill", 1, new, cached) for new, cached in chunks]
    decodes: list[Point] = [("decode", batch, 1, context) for batch, context in DECODES]
    share_s = 0.4 * budget_s
    found = [
        *_within(engine, share_s, prefills, min(least + 1, ALWAYS), patient_s),
        *_within(engine, share_s, decodes, least, patient_s),
    ]
    return found if brief else [*found, *_mixed_within(engine, 0.2 * budget_s)]


def is_much_faster(engine: MeasuredEngine, samples: Iterable[StepSample]) -> bool:
    """Whether the engine's shortest decode step takes less than `MUCH_FASTER` of its stored time.
    Runs at most two steps, because the first one may have to read the weights from the disk."""
    alone = [s for s in samples if s.kind == "decode" and s.batch == 1]
    if not alone:
        return False
    stored = min(alone, key=lambda s: s.context_tokens)
    step = _step(engine, 1, 1, stored.context_tokens)
    return any(_run(engine, step) < MUCH_FASTER * stored.seconds for _ in range(2))


def measure_curve(
    engine: MeasuredEngine, budget_s: float, say: Callable[[StepSample], None]
) -> list[StepSample]:
    """Measures steps of one chunk by the chunk's size, small ones first, within `budget_s`.

    The curve shows the machine's tile size and its saturation. `say` is called with each measured
    sample.
    """
    _run(engine, _step(engine, 1, 16, 0))
    points: list[Point] = [("curve", 1, new, 0) for new in sorted({*CURVE, *tile_points()})]
    samples = []
    for sample in _within(engine, budget_s, points):
        say(sample)
        samples.append(sample)
    return samples


def _mixed_within(engine: MeasuredEngine, budget_s: float) -> Iterator[StepSample]:
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
        yield StepSample(
            kind="mixed",
            new_tokens=new,
            context_tokens=cached,
            batch=batch,
            decode_context_tokens=batch * context,
            seconds=seconds,
        )


def _within(
    engine: MeasuredEngine,
    budget_s: float,
    points: Iterable[Point],
    least: int = ALWAYS,
    patient_s: float = inf,
) -> Iterator[StepSample]:
    """Yields points while there is time: `least` points even if they are slow, and `ALWAYS` until
    the clock shows `patient_s`."""
    ends_s = time.perf_counter() + budget_s
    fitting = dict.fromkeys(_fitted(engine, point) for point in points)
    per_token_s = 0.0
    for i, (kind, batch, new, context) in enumerate(fitting):
        now_s = time.perf_counter()
        is_needed = i < least or (i < ALWAYS and now_s < patient_s)
        if not is_needed and now_s + per_token_s * batch * new > ends_s:
            return
        seconds = _best_s(engine, _step(engine, batch, new, context), ends_s)
        per_token_s = seconds / (batch * new)
        yield StepSample(
            kind=kind,
            new_tokens=batch * new,
            context_tokens=batch * context,
            batch=batch,
            seconds=seconds,
        )


def _fitted(engine: MeasuredEngine, point: Point) -> Point:
    """The point, limited to the model's context and the size of the arena."""
    kind, batch, new, context = point
    most = min(engine.spec.max_positions, engine.num_blocks * engine.layout.block_tokens)
    new = min(new, most)
    return kind, batch, new, min(context, most - new)


def _step(engine: MeasuredEngine, batch: int, new: int, context: int) -> list[StepEntry]:
    """Sequences in disjoint blocks, as far as the arena is large enough."""
    blocks = engine.layout.blocks_for(new + context)
    ids = count()
    return [
        StepEntry(
            attempt_id=AttemptId(f"calibration-{i}"),
            new_token_ids=[(i + 7 * t) % 256 for t in range(new)],
            start=context,
            block_ids=[BlockId(next(ids) % engine.num_blocks) for _ in range(blocks)],
            draw=_GREEDY,
            any_content=True,
        )
        for i in range(batch)
    ]


def _best_s(engine: MeasuredEngine, step: list[StepEntry], ends_s: float) -> float:
    best_s = _run(engine, step)
    for _ in range(REPEATS - 1):
        if time.perf_counter() + best_s > ends_s:
            break
        best_s = min(best_s, _run(engine, step))
    return best_s


def _run(engine: MeasuredEngine, step: list[StepEntry]) -> float:
    return engine.step(step).seconds


def tile_points() -> tuple[int, ...]:
    """Chunk sizes whose times `find_tile` needs: ends of tiles, and one token beyond each."""
    ends = {tile * multiple for tile in TILES for multiple in MULTIPLES}
    return tuple(sorted(ends | {end + 1 for end in ends}))


def find_tile(curve: Mapping[int, float]) -> int:
    """Returns the device's tile in tokens: the largest candidate for which, past each of its
    multiples, one more token costs a whole tile. Returns 1 if there is none or points are missing.
    `curve`: the seconds of a step by its number of prefill tokens."""
    for tile in TILES:
        ends = [tile * multiple for multiple in MULTIPLES]
        if not all(end in curve and end + 1 in curve for end in ends):
            continue
        steps = [(curve[end + 1] - curve[end]) / (curve[end] * tile / end) for end in ends]
        if min(steps) >= WHOLE_TILE:
            return tile
    return 1
