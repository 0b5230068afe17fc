"""Runs one instance alone, without Conductor, head or other instances.

The instance gets its attempts when they arrive, and decides alone how they are batched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from moonpool.cost.model import StepCost
from moonpool.protocol.messages import (
    AttemptFailed,
    AttemptId,
    AttemptSpec,
    StartPrefill,
    StepTokens,
)
from moonpool.scheduler.actions import RunStep, SendReport, StopRepeating, WorkerEvent
from moonpool.scheduler.instance import Instance, InstanceDriver, Performers
from moonpool.sim.clock import Clock, Priority
from moonpool.sim.engine import SimEngine
from moonpool.types import SamplingParams, Slo

NEVER_LATE_S = 1e9


def solo_attempt(
    name: str,
    token_ids: Sequence[int],
    sampling: SamplingParams,
    *,
    tbt_s: float = NEVER_LATE_S,
    **more: Any,
) -> AttemptSpec:
    """Returns the first attempt of a request without tenant. The attempt has no SLO unless `tbt_s`
    is given. `more`: further fields of the attempt."""
    usual: dict[str, Any] = {"tenant": "", "use_cache": True, "timeout_s": NEVER_LATE_S}
    return AttemptSpec(
        attempt_id=AttemptId(name),
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=sampling,
        slo=Slo(ttft_s=NEVER_LATE_S, tbt_s=tbt_s),
        **usual | more,
    )


class SoloRun:
    """A mixed instance in virtual time. `hear` gets the tokens that the steps of the instance
    draw."""

    def __init__(
        self,
        instance: Instance,
        attempts: Sequence[tuple[float, AttemptSpec]],
        hear: Callable[[StepTokens], None],
    ) -> None:
        """`attempts`: the attempts, each with the time at which it arrives."""
        self.instance = instance
        self.clock = Clock()
        self._attempts = attempts
        self._by_id = {attempt.attempt_id: attempt for _, attempt in attempts}
        self._hear = hear

    def simulated_engine(self, cost: StepCost) -> SimEngine:
        """Returns an engine whose steps take the times that `cost` predicts. All answers have their
        largest length."""
        return SimEngine(
            self.clock,
            cost,
            lambda attempt_id: self._by_id[attempt_id].sampling.max_tokens,
            lambda attempt_id: self._by_id[attempt_id].num_prompt_tokens,
            self.post,
            lambda has_chunks, begins: 1.0,
            lambda attempt_id, seconds: None,
        )

    def run(
        self,
        run_step: Callable[[RunStep], object],
        stop_repeating: Callable[[], object] = lambda: None,
    ) -> None:
        """Serves all attempts to their end. `run_step` begins a step, whose end it posts later.
        Raises AssertionError if an attempt fails."""
        performers: Performers = {
            RunStep: run_step,
            StopRepeating: lambda action: stop_repeating(),
            SendReport: self._on_report,
        }
        self._driver = InstanceDriver(self.instance, lambda: self.clock.now, performers)
        for arrived_s, attempt in self._attempts:
            self.clock.at(arrived_s, Priority.ARRIVAL, self.post, StartPrefill(attempt=attempt))
        self.clock.run()
        assert not self.instance.requests, "the instance left requests unserved"

    def post(self, event: WorkerEvent) -> None:
        """Gives the instance an event at the current time."""
        self._driver.post(event)

    def _on_report(self, action: SendReport) -> None:
        match action.report:
            case StepTokens() as report:
                self._hear(report)
            case AttemptFailed() as report:
                raise AssertionError(report.message)
