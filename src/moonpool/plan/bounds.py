"""What arithmetic says of a cluster before it is simulated: its load, and the most that it attains.

A step of N tokens takes at least as long as their share of a large step; a prompt is computed but
for what an endless cache holds; a decode step has at most as many sequences as fit in memory and
keep the TBT. The instances that prefill have, for the arrivals of a window of time, at most its
length and the TTFT SLO; those that decode also have the time of an answer. The requests with least
work that fill this time are the most that can be effective.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from moonpool.config import Config, ConfigError
from moonpool.cost.model import Chunk, StepCost
from moonpool.plan.candidate import Candidate
from moonpool.plan.demand import Demand
from moonpool.plan.trial import Workload
from moonpool.sim.hardware.build import NodeHardware, build_hardware
from moonpool.types import Struct

SURE = 0.95
"""Share of the computed work that is assumed, because fitted costs are not exact."""
MOST_OVER = 1.2
"""A step that takes this many times the TBT SLO has no effective request."""
WINDOWS = (1 / 1, 1 / 6, 1 / 24, 1 / 96)
"""Lengths of windows as shares of the trace."""


class RequestWork(Struct, frozen=True):
    """Least seconds of each request on one prefill or mixed, and on one decoding instance."""

    prefill_s: np.ndarray
    decode_s: np.ndarray
    mixed_decode_s: np.ndarray


class Bounds:
    """Bounds for the candidates of one workload."""

    def __init__(self, workload: Workload, base: Config, demand: Demand) -> None:
        self._workload = workload
        self._base = base
        self._arrived_s = np.array(demand.arrived_s)
        self._input = np.array(demand.input_tokens)
        self._new = np.maximum(self._input - np.array(demand.hit_tokens), 1)
        self._output = np.array(demand.output_tokens)
        self._duration_s = max(demand.duration_s, 1e-9)
        self._works: dict[object, RequestWork | None] = {}
        self._missed: dict[object, int] = {}

    def load(self, one: Candidate) -> float:
        """Returns the least work over the time there is, of the role with most of it."""
        work = self._work(one)
        if work is None:
            return float("inf")
        prefill_s, decode_s = float(work.prefill_s.sum()), float(self._decode_s(one, work).sum())
        both_s = (prefill_s + decode_s) / one.num_instances
        prefills, decodes = one.prefill + one.mixed, one.decode + one.mixed
        return max(prefill_s / prefills, decode_s / decodes, both_s) / self._duration_s

    def most_share(self, one: Candidate) -> float:
        """Returns an upper bound of the attainment."""
        work = self._work(one)
        if work is None:
            return 0.0
        slo = self._base.slo
        answer_s = slo.ttft_s + slo.tbt_s * float(self._output.max())
        decode_s = self._decode_s(one, work)
        parts = (
            ("prefill", work.prefill_s, one.prefill + one.mixed, slo.ttft_s),
            ("decode", decode_s, one.decode + one.mixed, answer_s),
            ("both", work.prefill_s + decode_s, one.num_instances, answer_s),
        )
        misses = 0
        for name, work_s, number, slack_s in parts:
            key = (_hardware_key(one), bool(one.mixed), name, number)
            if key not in self._missed:
                self._missed[key] = self._misses(work_s, number, slack_s)
            misses = max(misses, self._missed[key])
        return 1.0 - misses / len(self._arrived_s)

    def _decode_s(self, one: Candidate, work: RequestWork) -> np.ndarray:
        return np.minimum(work.decode_s, work.mixed_decode_s) if one.mixed else work.decode_s

    def _misses(self, work_s: np.ndarray, num_instances: int, slack_s: float) -> int:
        """Returns the fewest requests that cannot be done in time, over all lengths of windows."""
        most = 0
        for share in WINDOWS:
            length_s = self._duration_s * share
            if length_s < slack_s / 4 and share < 1:
                break
            windows = np.minimum(self._arrived_s // length_s, round(1 / share) - 1).astype(int)
            room_s = num_instances * (length_s + slack_s)
            missed = 0
            for window in range(round(1 / share)):
                sums = np.cumsum(np.sort(work_s[windows == window]))
                missed += len(sums) - int(np.searchsorted(sums, room_s, side="right"))
            most = max(most, missed)
        return most

    def _work(self, one: Candidate) -> RequestWork | None:
        """Returns the work; None for hardware that cannot exist."""
        key = _hardware_key(one)
        if key not in self._works:
            try:
                hardware = build_hardware(
                    one.config(self._base), self._workload.profile, self._workload.catalogue
                )
            except ConfigError:
                self._works[key] = None
            else:
                node = hardware.prefill
                self._works[key] = RequestWork(
                    SURE * self._prefill_s(node.ground_truth),
                    SURE * self._decodes_s(hardware.decode if one.decode else node),
                    SURE * self._decodes_s(node),
                )
        return self._works[key]

    def _prefill_s(self, cost: StepCost) -> np.ndarray:
        alone_s = cost.step_s((Chunk(1, 0, 0, True),), 0, 0)
        return np.array(
            [
                max(cost.step_s((Chunk(new, start, start, True),), 0, 0) - alone_s, 0.0)
                for new, start in _pairs(self._new, self._input - self._new)
            ]
        )

    def _decodes_s(self, node: NodeHardware) -> np.ndarray:
        """Returns each answer's share of steps with as many sequences of its context as can be."""
        cost, config = node.ground_truth, self._base
        room = node.engine_tokens
        shares: dict[int, float] = {}
        found = []
        for context, answer in _pairs(self._input, self._output):
            size = 1 << (context + 1).bit_length() - 1  # at most the context
            if size not in shares:
                shares[size] = _least_share_s(
                    cost, size, min(room // size, config.engine.max_sequences), config.slo.tbt_s
                )
            found.append((answer - 1) * shares[size])
        return np.array(found)


def _pairs(left: np.ndarray, right: np.ndarray) -> Sequence[tuple[int, int]]:
    return list(zip(left.tolist(), right.tolist(), strict=True))


def _least_share_s(cost: StepCost, context: int, most: int, tbt_s: float) -> float:
    """Returns the least time of a step per sequence, of steps within the TBT."""
    least_s, low, high = cost.step_s((), 1, context), 1, max(most, 1)
    while low < high:  # a larger batch takes longer, and less per sequence
        batch = (low + high + 1) // 2
        step_s = cost.step_s((), batch, batch * context)
        if step_s * cost.num_stages > MOST_OVER * tbt_s:
            high = batch - 1
        else:
            low, least_s = batch, min(least_s, step_s / batch)
    return least_s


def _hardware_key(one: Candidate) -> tuple[object, ...]:
    return one.kind, one.prefill_stages, one.decode_kind if one.decode else None
