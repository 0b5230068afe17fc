"""Makes simulated instances depart from the cost model that the Conductor estimates with.

There are three departures: noise of single steps, instances slower than their role, and the
recorded behaviour of a live cluster (`cost.recorded`). With a record, an instance reports the
recorded profile, and each step takes that profile's time multiplied by a recorded ratio. With a
record of estimates only, a step takes the hardware's time multiplied by the ratio.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from random import Random

from moonpool.cost.recorded import CostEstimatorRecord, InstanceRecord
from moonpool.sim.hardware.build import NodeHardware
from moonpool.types import InstanceId, Role

StepFactor = Callable[[bool, bool], float]
"""Maps (step has prefill chunks, step generates an answer's second token) to a time factor."""


class Perturbation:
    """The departures of all instances from the cost model.

    `noise` is the largest relative departure of a step. `slow` maps instances to factors of their
    step times. `recorded` is a live cluster to imitate; if more instances are simulated than were
    recorded, records are reused.
    """

    def __init__(
        self,
        noise: float = 0.0,
        slow: Mapping[str, float] | None = None,
        recorded: CostEstimatorRecord | None = None,
    ) -> None:
        self._noise = noise
        self._slow = dict(slow or {})
        self._recorded = recorded

    def hardware(self, hardware: NodeHardware, role: Role, number: int) -> NodeHardware:
        """Returns the hardware of the `number`-th instance of a role, with any recorded profile."""
        record = self._record(role, number)
        if record is None or self._recorded is None:
            return hardware
        if self._recorded.only_estimates:
            return replace(hardware, estimate=record.profile)
        return replace(hardware, ground_truth=record.profile, estimate=record.profile)

    def step_factor(
        self, instance_id: InstanceId, role: Role, number: int, rng: Random
    ) -> StepFactor:
        """Returns the function that gives the factor of each step of an instance, from `rng`."""
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
