"""One mixed instance of one or several stages, without head or sockets: its state machine and its
engine, or a cost model in the engine's place. All requests wait when it starts."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from benchmarks.suite.engine.single_instance import FREE
from moonpool.cost.model import StepCost
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.messages import (
    AttemptFailed,
    AttemptSpec,
    PrefillStarted,
    StartPrefill,
    StepTokens,
)
from moonpool.scheduler.actions import RunStep, SendReport, StepEnded
from moonpool.scheduler.instance import Instance, InstanceDriver, Performers
from moonpool.scheduler.instance_config import InstanceConfig, steps_in_flight
from moonpool.types import Role, SamplingParams
from moonpool_engine.engine.builtin import DTYPES, open_model
from moonpool_engine.engine.cuda.host_sync import make_host_sync
from moonpool_engine.engine.ops import KvCache
from moonpool_engine.engine.parallel.pipeline import Outcome, PipelineEngine, StageOptions
from moonpool_engine.engine.runner import Engine, choose_ops, make_layout
from moonpool_engine.transfer.arena import Arena
from moonpool_lab.solo import SoloRun, solo_attempt

_MANY_TOKENS = 251
_GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True)
class PipelinedJob:
    """`output_tokens` are drawn after the prompt, as `sampling` specifies."""

    token_ids: Sequence[int]
    output_tokens: int
    sampling: SamplingParams = _GREEDY


@dataclass(slots=True)
class PipelinedResult:
    """The results of the jobs. `busy_s`: seconds for which each stage was busy, by the clock.
    `cpu_s`: CPU seconds of its processes in that time, or 0 if simulated. If `cpu_s` is less than
    `busy_s`, other processes had the cores for the rest.
    """

    seconds: float
    busy_s: list[float]
    tokens: list[list[int]] = field(default_factory=list)
    cached_tokens: int = 0
    cpu_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)  # time of each step, if measured

    @property
    def bubble_share(self) -> float:
        """The idle share of the stages' time, including filling and draining."""
        return 1.0 - sum(self.busy_s) / (len(self.busy_s) * self.seconds)


def made_up(number: int, prompt_tokens: int, output_tokens: int) -> PipelinedJob:
    """Returns the prompt of this number, which differs from those of all other numbers."""
    return PipelinedJob(
        [(number + 7 * t) % _MANY_TOKENS for t in range(prompt_tokens)], output_tokens
    )


class PipelinedInstance:
    """The instance's engine lives from the start of the `with` block to its end. Raises ValueError,
    StageLostError, ArenaError."""

    def __init__(
        self,
        model: str,
        dtype: str,
        num_stages: int,
        kv_tokens: int,
        chunk_tokens: int,
        block_tokens: int = 64,
        threads: int = 1,
        device: str = "cpu",
    ) -> None:
        loaded = open_model(model, dtype)
        ops = choose_ops(loaded.dtype, device)
        self.spec = loaded.spec
        self.layout = make_layout(loaded, block_tokens, ops)
        self.num_stages = num_stages
        self._threads = threads
        self.arena = Arena(self.layout, self.layout.blocks_for(kv_tokens), sealed=False)
        flat = torch.frombuffer(self.arena.buffer, dtype=DTYPES[dtype])
        shape = (self.arena.num_blocks, self.layout.num_layers, self.layout.slice_elements)
        cache = KvCache(flat.view(shape), self.layout)
        self.engine: Engine | PipelineEngine
        if num_stages == 1:
            sync = None if device == "cpu" else make_host_sync(cache, ops.device)
            self.engine = Engine(loaded, ops, cache if sync is None else sync.cache, sync)
        else:
            options = StageOptions(num_stages, threads, chunk_tokens, device=device)
            fd = self.arena.fd
            self.engine = PipelineEngine(loaded, ops, cache, fd, options, "bench", _ignore)
        self.arena.seal()

    def __enter__(self) -> PipelinedInstance:
        return self

    def __exit__(self, *raised: object) -> None:
        if isinstance(self.engine, PipelineEngine):
            self.engine.close()
        self.arena.close()

    def run(self, jobs: Sequence[PipelinedJob], **config: Any) -> PipelinedResult:
        """Runs all jobs to their end with `config` for the state machine."""
        instance = make_instance(self.num_stages, self.layout, self.arena.num_blocks, config)
        steps: queue.SimpleQueue[RunStep | None] = queue.SimpleQueue()
        outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        before, cpu_s = self._busy_s(), self._cpu_s()
        steps_s: list[float] = []
        thread = threading.Thread(target=self._compute, args=(steps, outcomes), daemon=True)
        thread.start()
        began_s = time.perf_counter()
        gathered = _Gathered(len(jobs))
        performers: Performers = {RunStep: steps.put, SendReport: gathered.take}
        driver = InstanceDriver(instance, lambda: 0.0, performers)
        for number, job in enumerate(jobs):
            driver.post(StartPrefill(attempt=_attempt(number, job)))
        while instance.requests:
            outcome = outcomes.get()
            if isinstance(outcome, Exception):
                steps.put(None)
                raise outcome
            steps_s.append(outcome.seconds)
            driver.post(StepEnded(outcome.tokens, outcome.seconds))
        seconds = time.perf_counter() - began_s
        steps.put(None)
        thread.join()
        busy_s = [sum(steps_s)]
        if before:
            busy_s = [b - a for a, b in zip(before, self._busy_s(), strict=True)]
        return PipelinedResult(
            seconds, busy_s, gathered.tokens, gathered.cached_tokens, self._cpu_s() - cpu_s, steps_s
        )

    def _busy_s(self) -> list[float]:
        return list(self.engine.times.busy_s) if isinstance(self.engine, PipelineEngine) else []

    def _cpu_s(self) -> float:
        others = self.engine.pids if isinstance(self.engine, PipelineEngine) else []
        return sum(map(cpu_seconds, (os.getpid(), *others)))

    def _compute(
        self,
        steps: queue.SimpleQueue[RunStep | None],
        outcomes: queue.SimpleQueue[Outcome],
    ) -> None:
        torch.set_num_threads(self._threads)
        while (step := steps.get()) is not None:
            try:
                if isinstance(self.engine, PipelineEngine):
                    self.engine.begin(step.entries, None, outcomes.put)
                else:
                    outcomes.put(self.engine.step(step.entries))
            except Exception as error:
                outcomes.put(error)


def simulate(
    jobs: Sequence[PipelinedJob],
    cost: StepCost,
    layout: BlockLayout,
    num_blocks: int,
    **config: Any,
) -> PipelinedResult:
    """Runs the same jobs through the same state machine, with the step times of `cost`."""
    gathered = _Gathered(len(jobs))
    solo = SoloRun(
        make_instance(cost.num_stages, layout, num_blocks, config),
        [(0.0, _attempt(number, job)) for number, job in enumerate(jobs)],
        gathered.take_tokens,
    )
    engine = solo.simulated_engine(cost)
    solo.run(engine.submit)
    busy_s = [engine.figures.busy_s] * cost.num_stages
    return PipelinedResult(solo.clock.now, busy_s, gathered.tokens)


def make_instance(
    num_stages: int, layout: BlockLayout, num_blocks: int, config: dict[str, Any]
) -> Instance:
    usual = {"max_steps_in_flight": steps_in_flight(num_stages), "micro_batches": num_stages}
    settings = InstanceConfig(**(usual | {"prefix_caching": False} | config))
    return Instance(settings, layout, num_blocks, Role.MIXED, FREE, ())


def _attempt(number: int, job: PipelinedJob) -> AttemptSpec:
    sampling = replace(job.sampling, max_tokens=job.output_tokens, ignore_eos=True)
    return solo_attempt(str(number), tuple(job.token_ids), sampling)


class _Gathered:
    """Keeps what the instance reports."""

    def __init__(self, num_jobs: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(num_jobs)]
        self.cached_tokens = 0

    def take_tokens(self, report: StepTokens) -> None:
        for item in report.attempts:
            self.tokens[int(item.attempt_id)] += [t.token_id for t in item.tokens]

    def take(self, action: SendReport) -> None:
        match action.report:
            case StepTokens() as report:
                self.take_tokens(report)
            case PrefillStarted() as report:
                self.cached_tokens += report.cached_tokens
            case AttemptFailed() as report:
                raise RuntimeError(report.message)


def cpu_seconds(pid: int) -> float:
    """Returns the seconds that the process has used, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _ignore(message: str) -> None:
    """Does nothing, because a lost stage fails the running step, which is reported."""
