"""Bounds the load and the attainment of a cluster by arithmetic, before any simulation.

A step of N tokens takes at least the share of these tokens in the time of a large step. Prompt
tokens that an endless cache holds cost nothing. A decode step has at most as many sequences as fit
in memory and keep the TBT. Drafts bring as many tokens as their acceptance rate promises, and some
more by chance. Each draft costs a row of a step, and a draft model costs its rounds. For requests
that arrive in a window of time, prefill instances have at most the window's length and the TTFT
SLO; decode instances have the time of an answer in addition. If the requests with the least work
fill this time, no further request can be effective.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import numpy as np

from moonpool.config.tables import Config, ConfigError
from moonpool.cost.model import Chunk, StepCost
from moonpool.plan.candidate import Candidate
from moonpool.plan.demand import Demand, call_times_s
from moonpool.plan.trial import Workload
from moonpool.sim.hardware.build import NodeHardware, build_hardware
from moonpool.trace.row import TraceRow
from moonpool.types import Struct

SURE = 0.95
"""The share of the computed work that a bound assumes, because fitted costs are inexact."""
MOST_OVER = 1.2
"""If a step takes this many times the TBT SLO, none of its requests is effective."""
LUCK = 2.0
"""A request's drafts may be right more often than the mean by this many standard deviations."""
WINDOWS = (1 / 1, 1 / 6, 1 / 24, 1 / 96)
"""The lengths of the time windows, as shares of the trace."""


class RequestWork(Struct, frozen=True):
    """The least seconds of each request on one prefill (or mixed) and on one decode instance."""

    prefill_s: np.ndarray
    decode_s: np.ndarray
    mixed_decode_s: np.ndarray


class Bounds:
    """Computes the bounds for the candidates of one workload."""

    def __init__(self, workload: Workload, base: Config, demand: Demand) -> None:
        self._workload = workload
        self._base = base
        self._arrived_s = np.array(demand.arrived_s)
        self._input = np.array(demand.input_tokens)
        self._new = np.maximum(self._input - np.array(demand.hit_tokens), 1)
        self._output = np.array(demand.output_tokens)
        self._duration_s = max(demand.duration_s, 1e-9)
        self._windows: tuple[float, ...] = WINDOWS
        if any(row.after for row in workload.rows):
            self._windows = WINDOWS[:1]
            self._duration_s = self._slowest_s()
        self._works: dict[object, RequestWork | None] = {}
        self._missed: dict[object, int] = {}

    def _slowest_s(self) -> float:
        """Returns how long programs take if their calls just keep the SLOs. A call of a program has
        no fixed window of time, because the call arrives later if an earlier answer takes
        longer."""
        slo = self._base.slo.loosest

        def answered_s(row: TraceRow) -> float:
            return slo.ttft_s + slo.tbt_s * row.output_tokens

        return max(call_times_s(self._workload.rows, answered_s))

    def load(self, one: Candidate) -> float:
        """Returns the least work divided by the available time, for the role with the most work."""
        work = self._work(one)
        if work is None:
            return float("inf")
        prefill_s, decode_s = float(work.prefill_s.sum()), float(self._decode_s(one, work).sum())
        both_s = (prefill_s + decode_s) / one.num_instances
        prefills, decodes = one.prefill + one.mixed, one.decode + one.mixed
        return max(prefill_s / prefills, decode_s / decodes, both_s) / self._duration_s

    def most_share(self, one: Candidate) -> float:
        """Returns an upper bound of the candidate's attainment."""
        work = self._work(one)
        if work is None:
            return 0.0
        slo = self._base.slo.loosest
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
        """Returns the least number of requests that must be late, over all window lengths."""
        most = 0
        for share in self._windows:
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
        """Returns the work of the requests, or None for hardware that cannot exist."""
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
                    SURE * self._decodes_s(hardware.decode if one.decode else hardware.mixed),
                    SURE * self._decodes_s(hardware.mixed),
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
        """Returns each answer's share of the time of decode steps in the best case, with the
        largest batch that the context allows and the best number of drafts."""
        config, room = self._base, node.engine_tokens
        speculative = config.engine.speculative_config
        most = 0 if speculative is None else speculative.num_speculative_tokens
        acceptance = config.hardware.draft_acceptance
        shares: dict[int, list[float]] = {}
        found = []
        for context, answer in _pairs(self._input, self._output):
            # a power of two, at most the context of the first decode
            size = 1 << (context + 1).bit_length() - 1
            if size not in shares:
                batch = min(room // size, config.engine.max_sequences)
                shares[size] = [
                    _least_share_s(node, size, batch, config.slo.loosest.tbt_s, drafts)
                    for drafts in range(most + 1)
                ]
            left = answer - 1
            found.append(
                min(
                    left / tokens_of_step(acceptance, drafts, left) * share_s
                    for drafts, share_s in enumerate(shares[size])
                )
            )
        return np.array(found)


def _pairs(left: np.ndarray, right: np.ndarray) -> Sequence[tuple[int, int]]:
    return list(zip(left.tolist(), right.tolist(), strict=True))


def tokens_of_step(acceptance: float, drafts: int, answer_tokens: int) -> float:
    """Returns the tokens that a step with this many drafts adds to an answer with luck: the mean
    plus LUCK standard deviations of the mean over the steps of the answer."""
    if not drafts or answer_tokens <= 0:
        return 1.0
    chances = [acceptance**number for number in range(drafts + 1)]
    mean = sum(chances)
    square = sum((2 * number + 1) * chance for number, chance in enumerate(chances))
    deviation = sqrt(max(square - mean * mean, 0.0) * mean / answer_tokens)
    return min(mean + LUCK * deviation, drafts + 1.0)


def _least_share_s(node: NodeHardware, context: int, most: int, tbt_s: float, drafts: int) -> float:
    """Returns the least step time per sequence among steps within the TBT. Each sequence has this
    many drafts."""
    cost, draft = node.ground_truth, node.draft

    def times_s(batch: int) -> tuple[float, float]:
        """Returns the seconds of one stage, and of the draft model that the first stage awaits."""
        rounds_s = 0.0
        if draft is not None and drafts:
            rounds_s = drafts * draft.ground_truth.step_s((), batch, batch * context)
        return cost.step_s((), batch * (1 + drafts), batch * context), rounds_s

    least_s, low, high = sum(times_s(1)), 1, max(most, 1)
    while low < high:  # a larger batch takes longer, but less time per sequence
        batch = (low + high + 1) // 2
        stage_s, rounds_s = times_s(batch)
        if stage_s * cost.num_stages + rounds_s > MOST_OVER * tbt_s:
            high = batch - 1
        else:
            low, least_s = batch, min(least_s, (stage_s + rounds_s) / batch)
    return least_s


def _hardware_key(one: Candidate) -> tuple[object, ...]:
    return one.kind, one.prefill_stages, one.decode_kind if one.decode else None
