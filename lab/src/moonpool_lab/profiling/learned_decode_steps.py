"""Computes the times of decode steps in a rehearsal, relative to those that the probes predict.

The module finds out which answers shared a step, and which instances computed at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import fsum

from moonpool.cost.fitted import DecodeSpread, FittedCost
from moonpool.types import Struct

MOST = 20.0
"""Larger ratios are left out, because something outside the model delayed such a step."""


NUM_RATIOS = 32


class RehearsedRequest(Struct, frozen=True):
    """One request as its client observed it, with the times of the prefill from the server."""

    prefill_instance: str
    decode_instance: str
    prefill_began_s: float
    prefill_ended_s: float
    prompt_tokens: int
    instants_s: tuple[float, ...]  # arrival times of its tokens

    def decodes_at(self, at_s: float) -> bool:
        return self.instants_s[0] <= at_s <= self.instants_s[-1]

    def begins_at(self, at_s: float) -> bool:
        """Whether the time lies between the first two tokens of the answer."""
        return self.decodes_at(at_s) and at_s <= self.instants_s[1]

    def tokens_at(self, at_s: float) -> int:
        return self.prompt_tokens + sum(instant_s <= at_s for instant_s in self.instants_s)


def step_spread(
    answers: Sequence[RehearsedRequest], cost: FittedCost, num_instances: int
) -> DecodeSpread:
    """Returns the ratios for `FittedCost.decode_spread`, without steps that contain prompts."""
    answers = [answer for answer in answers if len(answer.instants_s) > 1]
    alone, shared, beginning = list[float](), list[float](), list[float]()
    for answer in answers:
        for before_s, after_s in pairwise(answer.instants_s):
            middle_s = (before_s + after_s) / 2
            here = answer.decode_instance
            if any(
                other.prefill_instance == here
                and other.prefill_began_s < after_s
                and other.prefill_ended_s > before_s
                for other in answers
            ):
                continue
            batch = [o for o in answers if o.decode_instance == here and o.decodes_at(middle_s)]
            busy = len(_computing(answers, middle_s) - {here})
            tokens = sum(other.tokens_at(middle_s) for other in batch)
            slower = 1.0 + (cost.contention[1] - 1.0) * busy / max(num_instances - 1, 1)
            ratio = (after_s - before_s) / (cost.decode_step_s(len(batch), tokens) * slower)
            ratio = min(ratio, MOST)
            if any(other.begins_at(middle_s) for other in batch):
                beginning.append(ratio)
            else:
                (shared if busy else alone).append(ratio)
    usual = equally_likely(alone + shared)
    return (
        equally_likely(alone) or usual,
        equally_likely(shared) or usual,
        equally_likely(beginning) or usual,
    )


def _computing(answers: Sequence[RehearsedRequest], at_s: float) -> set[str]:
    """Returns the instances that compute at this time."""
    found = {o.decode_instance for o in answers if o.decodes_at(at_s)}
    return found | {
        o.prefill_instance for o in answers if o.prefill_began_s <= at_s <= o.prefill_ended_s
    }


def equally_likely(ratios: Sequence[float]) -> tuple[float, ...]:
    """Reduces ratios (the time of a single step over its usual time) to NUM_RATIOS equally likely
    values in rising order with the same mean. Returns no values for fewer ratios than NUM_RATIOS.

    A serving machine runs a head, a client, transfers and a kernel beside the engine. A mean alone
    would make all gaps equal, so no quantile of gaps would be right. A simulation draws from these
    ratios.
    """
    if len(ratios) < NUM_RATIOS:
        return ()
    # NUM_RATIOS of each, so that every part has as many
    found = [ratio for ratio in sorted(ratios) for _ in range(NUM_RATIOS)]
    size = len(ratios)
    return tuple(fsum(found[i * size : (i + 1) * size]) / size for i in range(NUM_RATIOS))
