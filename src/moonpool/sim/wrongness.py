"""How the truth of each simulated instance departs from what the Conductor is told of it.

Noise of single steps, instances that are slower than their kind, or all that a live cluster was
seen to do (`cost.recorded`): an instance then claims a recorded profile, and each of its steps
takes one of the recorded ratios times that. Decides nothing; draws from the generator it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

from moonpool.cost.recorded import BeliefRecord, InstanceRecord
from moonpool.sim.hardware import NodeHardware
from moonpool.types import InstanceId, Role

StepFactor = Callable[[bool, bool], float]
"""What a step's time is multiplied by: whether it has chunks of prompts, and whether it gives an
answer's second token."""


class Wrongness:
    """`noise`: each step takes up to this share longer or shorter. `slow`: instances that take so
    many times what their kind does. `recorded`: a live cluster to be like; where more instances
    are simulated than were recorded, their records are used again."""

    def __init__(
        self,
        noise: float = 0.0,
        slow: Mapping[str, float] | None = None,
        recorded: BeliefRecord | None = None,
    ) -> None:
        self._noise = noise
        self._slow = dict(slow or {})
        self._recorded = recorded

    def hardware(self, hardware: NodeHardware, role: Role, number: int) -> NodeHardware:
        """What the `number`-th instance of a role runs on: times as its record claims."""
        record = self._record(role, number)
        if record is None:
            return hardware
        return replace(hardware, truth=record.profile, belief=record.profile)

    def step_factor(
        self, instance_id: InstanceId, role: Role, number: int, rng: Random
    ) -> StepFactor:
        slow = self._slow.get(instance_id, 1.0)
        record = self._record(role, number)
        noise = self._noise
        prefill, decode = (record.prefill, record.decode) if record is not None else ((), ())

        def factor(has_chunks: bool, begins: bool) -> float:
            value = slow
            ratios = prefill if has_chunks else decode
            if ratios:
                value *= ratios[int(rng.random() * len(ratios))]
            if noise:
                value *= 1.0 + noise * (2.0 * rng.random() - 1.0)
            return value

        return factor

    def _record(self, role: Role, number: int) -> InstanceRecord | None:
        if self._recorded is None:
            return None
        instances = self._recorded.instances
        same = [each for each in instances if each.role is role]
        return (same or instances)[number % len(same or instances)]
