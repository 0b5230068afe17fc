"""Runs one mixed instance and its steps on one clock: the engine's, or a cost model's.

The state machine is the one used for serving. Each step takes the engine's measured time or the
model's time, and requests arrive on this clock. So a measured run and a predicted one differ in
nothing else, and waiting for the next arrival costs no time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from moonpool.cost.fitted import FittedCost
from moonpool.kvcache.block_owner import BlockOwner
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.messages import AttemptSpec, StepTokens
from moonpool.scheduler.actions import RunStep, StepEnded, WorkerEvent
from moonpool.scheduler.instance import Instance
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.sim.clock import Priority
from moonpool.types import Role, SamplingParams
from moonpool_engine.engine.runner import Engine
from moonpool_lab.solo import SoloRun, solo_attempt

UNLIMITED = float("inf")
_MANY_TOKENS = 251


@dataclass(frozen=True, slots=True)
class TimedJob:
    arrived_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(slots=True)
class TimedResult:
    """The results of the jobs, in their order."""

    ttft_s: list[float]
    gaps_s: list[float] = field(default_factory=list)  # gaps between tokens, of all answers
    # block seconds held until the first token
    held_block_s: list[float] = field(default_factory=list)
    makespan_s: float = 0.0


def serve(
    jobs: Sequence[TimedJob],
    config: InstanceConfig,
    layout: BlockLayout,
    num_blocks: int,
    cost: FittedCost,
    engine: Engine | None = None,
) -> TimedResult:
    """Runs all jobs, which are ordered by time, to their end. Steps take the time that `engine`
    takes, or else the time that `cost` predicts."""
    instance = Instance(config, layout, num_blocks, Role.MIXED, cost, ())
    return _Run(instance, jobs).timed(cost, engine)


class _Run(SoloRun):
    def __init__(self, instance: Instance, jobs: Sequence[TimedJob]) -> None:
        attempts = [(job.arrived_s, _attempt(number, job)) for number, job in enumerate(jobs)]
        super().__init__(instance, attempts, self._note)
        self._jobs = jobs
        self._charged_s = 0.0
        self._last_s = [0.0] * len(jobs)
        self._timed = TimedResult([-1.0] * len(jobs), held_block_s=[0.0] * len(jobs))

    def timed(self, cost: FittedCost, engine: Engine | None) -> TimedResult:
        def measured(step: RunStep) -> None:
            assert engine is not None
            began_s = time.perf_counter()
            tokens = engine.step(step.entries).tokens
            ended = StepEnded(tokens, time.perf_counter() - began_s)
            self.clock.after(ended.seconds, Priority.STEP_END, self.post, ended)

        self.run(self.simulated_engine(cost).submit if engine is None else measured)
        self._timed.makespan_s = self.clock.now
        return self._timed

    def post(self, event: WorkerEvent) -> None:
        """Charges blocks held by prompts that have not given their first token."""
        seconds, self._charged_s = self.clock.now - self._charged_s, self.clock.now
        held = self.instance.pool.owners()
        for number, ttft_s in enumerate(self._timed.ttft_s):
            if ttft_s < 0:
                num_held = held.get(BlockOwner("work", str(number)), 0)
                self._timed.held_block_s[number] += seconds * num_held
        super().post(event)

    def _note(self, report: StepTokens) -> None:
        timed, now_s = self._timed, self.clock.now
        for number in (int(item.attempt_id) for item in report.attempts):
            if timed.ttft_s[number] < 0:
                timed.ttft_s[number] = now_s - self._jobs[number].arrived_s
            else:
                timed.gaps_s.append(now_s - self._last_s[number])
            self._last_s[number] = now_s


def _attempt(number: int, job: TimedJob) -> AttemptSpec:
    tokens = tuple((number + 7 * t) % _MANY_TOKENS for t in range(job.prompt_tokens))
    sampling = SamplingParams(temperature=0.0, max_tokens=job.output_tokens, ignore_eos=True)
    # No limit to the gaps: the instance's own TBT SLO counts.
    return solo_attempt(str(number), tokens, sampling, tbt_s=UNLIMITED, use_cache=False)
