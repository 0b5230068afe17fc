"""One mixed instance and its steps on one clock: the engine's, or a cost model's.

The state machine is the one that serves; each step takes what the engine took, or what the model
says, and requests arrive in that time. So a measured run and a predicted one differ in nothing
else, and waiting for the next arrival costs no time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moonpool.cost.fitted import FittedCost
from moonpool.cost.model import Chunk
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.messages import AttemptId, AttemptSpec, StartPrefill, StepTokens
from moonpool.scheduler.actions import RunStep, SendReport, StepEnded, WorkerAction
from moonpool.scheduler.instance import Instance
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.types import Role, SamplingParams, Slo, Token
from moonpool_engine.engine.runner import Engine

Perform = Callable[[RunStep], StepEnded]
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
    gaps_s: list[float] = field(default_factory=list)  # between tokens, of all answers
    held_block_s: list[float] = field(default_factory=list)  # until the first token
    makespan_s: float = 0.0


def by_engine(engine: Engine) -> Perform:
    def perform(step: RunStep) -> StepEnded:
        began_s = time.perf_counter()
        result = engine.step(step.entries)
        return StepEnded(result.tokens, time.perf_counter() - began_s)

    return perform


def by_cost(cost: FittedCost) -> Perform:
    """Prompts are not cached: their computing begins at 0."""

    def perform(step: RunStep) -> StepEnded:
        chunks = [
            Chunk(len(e.new_token_ids), e.start, 0, e.draw is not None)
            for e in step.entries
            if not e.generated
        ]
        contexts = [e.start + 1 for e in step.entries if e.generated]
        tokens = [None if e.draw is None else Token(0) for e in step.entries]
        return StepEnded(tokens, cost.step_s(chunks, len(contexts), sum(contexts)))

    return perform


def serve(
    jobs: Sequence[TimedJob],
    config: InstanceConfig,
    layout: BlockLayout,
    num_blocks: int,
    cost: FittedCost,
    perform: Perform,
) -> TimedResult:
    """Serves all jobs, which come in order of time, to their end."""
    return _Run(jobs, config, layout, num_blocks, cost, perform).run()


class _Run:
    def __init__(
        self,
        jobs: Sequence[TimedJob],
        config: InstanceConfig,
        layout: BlockLayout,
        num_blocks: int,
        cost: FittedCost,
        perform: Perform,
    ) -> None:
        self._jobs, self._perform = jobs, perform
        self._instance = Instance(config, layout, num_blocks, Role.MIXED, cost, ())
        self._now = 0.0
        self._step: RunStep | None = None
        self._last_s = [0.0] * len(jobs)
        self._timed = TimedResult([-1.0] * len(jobs), held_block_s=[0.0] * len(jobs))

    def run(self) -> TimedResult:
        coming = deque(enumerate(self._jobs))
        while coming or self._step is not None:
            if self._step is None:
                self._now = max(self._now, coming[0][1].arrived_s)
            while coming and coming[0][1].arrived_s <= self._now:
                number, job = coming.popleft()
                self._take(self._instance.handle(StartPrefill(work=_work(number, job)), self._now))
            if self._step is None:
                continue
            step, self._step = self._step, None
            ended = self._perform(step)
            self._charge(ended.seconds)
            self._now += ended.seconds
            self._take(self._instance.handle(ended, self._now))
        self._timed.makespan_s = self._now
        return self._timed

    def _charge(self, seconds: float) -> None:
        """Blocks held by prompts that have not given their first token."""
        held = self._instance.pool.owners()
        for number, ttft_s in enumerate(self._timed.ttft_s):
            if ttft_s < 0:
                self._timed.held_block_s[number] += seconds * held.get(f"work:{number}", 0)

    def _take(self, actions: Sequence[WorkerAction]) -> None:
        for action in actions:
            if isinstance(action, RunStep):
                self._step = action
            elif isinstance(action, SendReport) and isinstance(action.report, StepTokens):
                for item in action.report.works:
                    self._note(int(item.attempt_id))

    def _note(self, number: int) -> None:
        timed = self._timed
        if timed.ttft_s[number] < 0:
            timed.ttft_s[number] = self._now - self._jobs[number].arrived_s
        else:
            timed.gaps_s.append(self._now - self._last_s[number])
        self._last_s[number] = self._now


def _work(number: int, job: TimedJob) -> AttemptSpec:
    return AttemptSpec(
        attempt_id=AttemptId(str(number)),
        token_ids=tuple((number + 7 * t) % _MANY_TOKENS for t in range(job.prompt_tokens)),
        num_prompt_tokens=job.prompt_tokens,
        sampling=SamplingParams(temperature=0.0, max_tokens=job.output_tokens, ignore_eos=True),
        slo=Slo(ttft_s=UNLIMITED, tbt_s=UNLIMITED),  # the instance's own counts
        tenant="",
        use_cache=False,
        timeout_s=1e9,
    )
