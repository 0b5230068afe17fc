"""One way of a decode step with attention workers: how long it took, and where that time went."""

from __future__ import annotations

from collections.abc import Sequence

from moonpool.attention.remote_ops import RemoteOps
from moonpool.bench.attention_crew import Decodes
from moonpool.engine.runner import Engine
from moonpool.types import Struct


class Way(Struct, frozen=True):
    """`attention_s`: what the workers were busy, each; `waited_s`: what the model worker waited for
    them."""

    step_s: float
    attention_s: float
    waited_s: float

    @property
    def model_s(self) -> float:
        """What the model worker computed, and sent."""
        return self.step_s - self.waited_s

    @property
    def bound_s(self) -> float:
        """Of two batches that take turns: the busier side never waits."""
        return max(self.model_s, self.attention_s)


def timed_step(engine: Engine, ops: RemoteOps, decodes: Decodes) -> Way:
    attending_ns, waited_ns = ops.attending_ns, ops.waited_ns
    seconds = decodes.seconds(engine)
    return Way(
        step_s=seconds,
        attention_s=(ops.attending_ns - attending_ns) / 1e9 / ops.num_workers,
        waited_s=(ops.waited_ns - waited_ns) / 1e9,
    )


def by_time(ways: Sequence[Way]) -> list[Way]:
    """The shortest first."""
    return sorted(ways, key=lambda way: way.step_s)


def middle_way(ways: Sequence[Way]) -> Way:
    return by_time(ways)[len(ways) // 2]
