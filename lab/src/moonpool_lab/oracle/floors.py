"""The least time that a step can take, in a form that adds up over requests.

A bound on what a cluster can serve needs linear lower bounds of all costs: one for each prompt,
each token of it, each pair of tokens that attend to each other, each decode, and each token of its
context. `floor_of` derives these bounds from the cost model of the simulation. These inequalities
hold for every step:

    time >= prompt_s * long prompts that begin + token_s * chunk tokens + pair_s * pairs
            + beside_sequence_s * decodes + context_s * their context tokens
            + departures of the prompts
    time >= alone_s[decodes - 1] + context_s * their context tokens

where a token at position q of its prompt has q pairs. The second line holds with and without chunks
in the step. A departure is the time by which a measured cost is below a roofline's for a whole
prompt (`DomainCost`). Time above the roofline does not count, because prompts may share it. For
prompts that fit into one step together, the constant of a fitted cost does not count either. Of
longer prompts, only one can begin in a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from moonpool.config.tables import ConfigError
from moonpool.cost.fitted import FittedCost
from moonpool.cost.model import Chunk, StepCost
from moonpool.sim.hardware.domain_cost import DomainCost
from moonpool.sim.hardware.parallel_cost import PipelineCost
from moonpool.sim.hardware.roofline import RooflineCost

Floats = npt.NDArray[np.float64]
Number = TypeVar("Number", float, Floats)

LONG_CHUNK_TOKENS = 1 << 22
"""Length of a chunk that is limited by compute on every device, so that its time gives the time of
a pair."""
GRID_GROWTH = 1.002
"""Ratio between the step sizes at which the time per token is evaluated. Between two points of the
grid, the time at the smaller and the tokens at the larger point count."""


def none_s(num_tokens: int, cached_tokens: int) -> float:
    """Returns the departure of a cost that has none."""
    return 0.0


@dataclass(frozen=True, slots=True)
class CostFloor:
    """Least times of an instance's steps, in seconds; of one stage if it is a pipeline.

    `departure`: seconds, at most 0, for a prompt, by its length and its cached tokens.
    """

    prompt_s: float
    token_s: float
    pair_s: float
    # by number of decodes - 1, up to the most that a step has; the values never fall
    alone_s: Floats
    context_s: float
    beside_sequence_s: float
    num_stages: int = 1
    departure: Callable[[int, int], float] = none_s

    def scaled(self, factor: float) -> CostFloor:
        """Returns the floor with all times multiplied by `factor`."""
        departure = self.departure
        return replace(
            self,
            departure=lambda num_tokens, cached: factor * departure(num_tokens, cached),
            prompt_s=self.prompt_s * factor,
            token_s=self.token_s * factor,
            pair_s=self.pair_s * factor,
            alone_s=self.alone_s * factor,
            context_s=self.context_s * factor,
            beside_sequence_s=self.beside_sequence_s * factor,
        )

    def prefill_s(self, start: Number, end: Number) -> Number:
        """Returns the least time to compute tokens `start` to `end` of a prompt, without
        `prompt_s`."""
        return (end - start) * (self.token_s + 0.5 * self.pair_s * (end + start))

    def support(self, batch: float) -> tuple[float, float]:
        """Returns (e, f) with e + f B <= alone_s[B - 1] for all B, as near as can be at `batch`."""
        sizes = np.arange(1.0, len(self.alone_s) + 1.0)
        at = int(np.clip(round(batch), 1, len(sizes))) - 1
        others = sizes != sizes[at]
        slopes = (self.alone_s - self.alone_s[at])[others] / (sizes - sizes[at])[others]
        left, right = slopes[:at], slopes[at:]
        least = min(
            float(left.max(initial=0.0)) if at else np.inf, float(right.min(initial=np.inf))
        )
        slope = min(least, float((self.alone_s / sizes).min()))  # limited so that e is not negative
        return float((self.alone_s - slope * sizes).min()), slope


def floor_of(cost: StepCost, max_sequences: int, max_step_tokens: int) -> CostFloor:
    """Returns the floor of a cost model for steps of at most this many requests and tokens.

    Raises ConfigError for a cost model whose floor is not known.
    """
    if isinstance(cost, FittedCost):
        return _of_fit(cost, max_sequences)
    if isinstance(cost, RooflineCost):
        return _of_roofline(cost, max_sequences, max_step_tokens)
    if isinstance(cost, DomainCost):
        return _of_domain(cost, max_sequences, max_step_tokens)
    if isinstance(cost, PipelineCost):
        stage = floor_of(cost.stage, max_sequences, max_step_tokens).scaled(cost.share)
        return replace(stage, num_stages=cost.num_stages)
    raise ConfigError(
        f"there is no bound for instances with {type(cost).__name__}: use single nodes or pipelines"
        " without attention devices"
    )


def _of_fit(cost: FittedCost, max_sequences: int) -> CostFloor:
    """With c and d of the fit, a later chunk costs c (2 done + new) new + d cached new. So with
    min(c, d / 2) no division of a prompt into cached and computed tokens costs less."""
    a, b, c, d = cost.prefill
    e, f, g = cost.decode
    mixed_f, mixed_g = cost.mixed or (f, g)
    sizes = np.arange(1, max_sequences + 1)
    alone_s = np.array([cost.decode_step_s(int(size), 0) for size in sizes])
    per_sequence_s = min(mixed_f, float((alone_s / sizes).min()))
    alone_s = np.minimum(alone_s, e + mixed_f * sizes)
    return CostFloor(
        prompt_s=a,
        token_s=b,
        pair_s=2.0 * min(c, d / 2.0),
        alone_s=_never_falling(alone_s),
        context_s=min(g, mixed_g),
        beside_sequence_s=per_sequence_s,
    )


def _of_roofline(cost: RooflineCost, max_sequences: int, max_step_tokens: int) -> CostFloor:
    """The rows of a step share its overhead, so each row pays at least the overhead divided by the
    largest number of rows."""
    constant_s = cost.engine_overhead_s + cost.attention_launch_s
    sizes = _grid(max_step_tokens)
    row_s = min(
        (constant_s + cost.dense_s(before + 1)) / size
        for before, size in zip([0, *sizes[:-1]], sizes, strict=True)
    )
    alone_s = np.array(
        [constant_s + cost.dense_s(n) + cost.head_s(n) for n in range(1, max_sequences + 1)]
    )
    long = LONG_CHUNK_TOKENS
    long_s = cost.chunk_attention_s(Chunk(long, 0, 0, False))
    return CostFloor(
        prompt_s=0.0,
        token_s=row_s,
        pair_s=long_s / (long * (0.5 * (long + 1))),
        alone_s=_never_falling(alone_s),
        context_s=cost.decode_attention_s(1),
        beside_sequence_s=row_s,
    )


def _of_domain(cost: DomainCost, max_sequences: int, max_step_tokens: int) -> CostFloor:
    """Of several departures that lengthen a step only one counts, so only decodes without prompts
    have one."""
    floor = _of_roofline(cost.roofline, max_sequences, max_step_tokens)
    added_s = np.array([cost.decode_departure_s(n) for n in range(1, max_sequences + 1)])
    return replace(
        floor,
        alone_s=_never_falling(floor.alone_s + added_s),
        departure=lambda num_tokens, cached: min(cost.prompt_departure_s(num_tokens, cached), 0.0),
    )


def _grid(largest: int) -> list[int]:
    sizes = [1]
    while sizes[-1] < largest:
        sizes.append(min(max(sizes[-1] + 1, int(sizes[-1] * GRID_GROWTH)), largest))
    return sizes


def _never_falling(seconds: Floats) -> Floats:
    """Raises values so that a step with additional decodes never takes less time."""
    return np.asarray(np.minimum.accumulate(seconds[::-1])[::-1])
