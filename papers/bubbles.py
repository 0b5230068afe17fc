"""Idle time of a pipeline's stages between micro-batches, by cause.

SARATHI's kinds: PB1 between prefills of unequal length, PB2 between a prefill and decodes, PB3
between decodes of unequal contexts. A bubble is charged to every request of the micro-batch that
the stage waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moonpool.protocol.messages import AttemptId
from papers.single_instance import SoloStep

TOLERANCE_S = 1e-6


@dataclass(slots=True)
class Bubbles:
    by_request_s: dict[AttemptId, float] = field(default_factory=dict)
    by_kind_s: dict[str, float] = field(default_factory=dict)
    idle_s: float = 0.0  # of all stages, between their first step and their last
    busy_s: float = 0.0

    @property
    def share(self) -> float:
        return self.idle_s / (self.idle_s + self.busy_s)


def find_bubbles(
    steps: Sequence[SoloStep], num_stages: int, hop_s: Callable[[int], float]
) -> Bubbles:
    """Finds the bubbles in these steps, which are in the order of their run."""
    found = Bubbles()
    free_s = [-1.0] * num_stages
    previous: SoloStep | None = None
    for step in steps:
        at_s, waited_s = step.start_s, 0.0
        to_next_s = hop_s(step.chunk_tokens + step.num_decodes)
        for stage in range(num_stages):
            if stage:
                at_s += to_next_s
            if free_s[stage] >= 0:
                waited_s += max(at_s - free_s[stage], 0.0)
                at_s = max(at_s, free_s[stage])
            at_s += step.stage_s
            free_s[stage] = at_s
        assert abs(at_s - step.end_s) < TOLERANCE_S, "the stages are not as the engine ran them"
        found.idle_s += waited_s
        found.busy_s += step.stage_s * num_stages
        if previous is not None:
            kind = _kind(previous, step)
            found.by_kind_s[kind] = found.by_kind_s.get(kind, 0.0) + waited_s
        for work in step.works:
            found.by_request_s[work] = found.by_request_s.get(work, 0.0) + waited_s
        previous = step
    return found


def _kind(previous: SoloStep, step: SoloStep) -> str:
    prefills = bool(previous.chunk_tokens) + bool(step.chunk_tokens)
    return ("PB3", "PB2", "PB1")[prefills]
