"""One mixed instance alone: the state machine and the engine of the simulator, without a Conductor.

SARATHI's experiments are about what an instance puts into a step. The requests are given to it as
they arrive, in its own vocabulary; it alone decides how they are batched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from moonpool.config.tables import Batching
from moonpool.cost.fitted import FittedCost
from moonpool.cost.model import StepCost
from moonpool.distributions import Histogram
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.messages import AttemptId, AttemptSpec, StepTokens
from moonpool.scheduler.actions import RunStep
from moonpool.scheduler.instance import Instance
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.sim.engine import EOS_TOKEN_ID
from moonpool.sim.hardware.model_shapes import ModelShape
from moonpool.types import Role, SamplingParams
from moonpool_lab.solo import SoloRun, solo_attempt

BLOCK_TOKENS = 16
MAX_REPEATS = 256
_NO_BELIEF = FittedCost((0.0, 0.0, 0.0, 0.0), (0.0, 0.0, 0.0))  # a mixed instance never asks


@dataclass(frozen=True, slots=True)
class SoloRequest:
    """A request: `output_tokens` of answer, the first of them by its prompt's last chunk."""

    arrived_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class SoloStep:
    """One step that was run, or several repetitions of it; `stage_s` is the time of one stage."""

    start_s: float
    end_s: float
    stage_s: float
    works: tuple[AttemptId, ...]
    chunk_tokens: int
    num_decodes: int


@dataclass(slots=True)
class SoloResult:
    """The results of the jobs, in their order."""

    ttft_s: list[float]
    finished_s: list[float]
    gap_s: Histogram = field(default_factory=Histogram)
    steps: list[SoloStep] = field(default_factory=list)

    @property
    def makespan_s(self) -> float:
        return max(self.finished_s)


@dataclass(frozen=True, slots=True)
class SoloConfig:
    batching: Batching
    chunk_tokens: int
    max_sequences: int
    kv_tokens: int  # capacity
    steps_in_flight: int = 1


def serve(
    jobs: Sequence[SoloRequest],
    cost: StepCost,
    shape: ModelShape,
    config: SoloConfig,
    on_done: Callable[[int], None] | None = None,
) -> SoloResult:
    """Serves all jobs, which are ordered by time, to their end; `on_done` gets the number of ended
    jobs."""
    return _Solo(jobs, cost, shape, config, on_done).run()


def all_at_once(lengths: Iterable[tuple[int, int]]) -> list[SoloRequest]:
    """Jobs of these (prompt, output) tokens that all wait when the instance starts."""
    return [SoloRequest(0.0, prompt, output) for prompt, output in lengths]


class _Solo:
    def __init__(
        self,
        jobs: Sequence[SoloRequest],
        cost: StepCost,
        shape: ModelShape,
        config: SoloConfig,
        on_done: Callable[[int], None] | None,
    ) -> None:
        self._jobs = jobs
        layout = BlockLayout(
            model_fingerprint=shape.name,
            dtype="bfloat16",
            block_tokens=BLOCK_TOKENS,
            num_layers=shape.layers,
            num_kv_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            arithmetic="simulated",
        )
        instance = Instance(
            InstanceConfig(
                chunk_tokens=config.chunk_tokens,
                max_sequences=config.max_sequences,
                prefix_caching=False,
                batching=config.batching,
                max_steps_in_flight=config.steps_in_flight,
                # In a pipeline other steps run beside a repeated one, so no step is repeated.
                max_repeats=MAX_REPEATS if config.steps_in_flight == 1 else 1,
            ),
            layout,
            config.kv_tokens // BLOCK_TOKENS,
            Role.MIXED,
            _NO_BELIEF,
            (EOS_TOKEN_ID,),
        )
        attempts = [(job.arrived_s, _attempt(number, job)) for number, job in enumerate(jobs)]
        self._solo = SoloRun(instance, attempts, self._note)
        self._engine = self._solo.simulated_engine(cost)
        self._served = SoloResult([-1.0] * len(jobs), [-1.0] * len(jobs))
        self._last_token_s = [0.0] * len(jobs)
        self._num_done = 0
        self._on_done = on_done

    def run(self) -> SoloResult:
        self._solo.run(self._run_step, self._engine.stop_repeating)
        return self._served

    def _run_step(self, step: RunStep) -> None:
        busy_s = self._engine.figures.busy_s
        start_s, end_s = self._engine.submit(step)
        if step.max_repeats > 1:
            return  # decodes alone; when they end is not known yet
        num_decodes = sum(bool(entry.generated) for entry in step.entries)
        num_tokens = sum(len(entry.new_token_ids) for entry in step.entries)
        self._served.steps.append(
            SoloStep(
                start_s,
                end_s,
                self._engine.figures.busy_s - busy_s,
                tuple(entry.attempt_id for entry in step.entries),
                num_tokens - num_decodes,
                num_decodes,
            )
        )

    def _note(self, report: StepTokens) -> None:
        now, served = self._solo.clock.now, self._served
        for work in report.attempts:
            number = int(work.attempt_id)
            count = len(work.tokens)
            first_s = now - (count - 1) * report.gap_s
            if served.ttft_s[number] < 0:
                served.ttft_s[number] = first_s - self._jobs[number].arrived_s
            else:
                served.gap_s.add(first_s - self._last_token_s[number])
            served.gap_s.add(report.gap_s, count - 1)
            self._last_token_s[number] = now
            if work.finish is not None:
                served.finished_s[number] = now
                self._num_done += 1
                if self._on_done is not None:
                    self._on_done(self._num_done)


def _attempt(number: int, job: SoloRequest) -> AttemptSpec:
    sampling = SamplingParams(temperature=0.0, max_tokens=job.output_tokens)
    return solo_attempt(str(number), range(job.prompt_tokens), sampling, use_cache=False, keys=())
