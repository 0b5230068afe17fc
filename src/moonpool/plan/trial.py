"""One simulation as a unit of work: what to run, and what came of it. Runs in any process.

The same trial has the same outcome everywhere; nothing in an outcome depends on the machine.
"""

from __future__ import annotations

from collections.abc import Iterator

from moonpool.config import Config, ConfigError
from moonpool.cost.catalogue import BUILT_IN, Catalogue
from moonpool.cost.fitted import FittedCost
from moonpool.plan.confidence import Attainment
from moonpool.plan.watcher import Cause, Watcher
from moonpool.sim.arrival import Arrival
from moonpool.sim.hardware import build_hardware
from moonpool.sim.histogram import rounded
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import make_arrivals
from moonpool.trace.resample import resample
from moonpool.trace.row import TraceError, TraceRow
from moonpool.types import Role, Struct

SAMPLE_S = 60.0  # of the simulation's own series, which nobody reads here


class Span(Struct, frozen=True):
    """Part of a trace, in seconds of it: counted are arrivals of [begin, end); those of the
    `warm_up_s` before are served too, and fill the caches."""

    begin_s: float = 0.0
    end_s: float = float("inf")
    warm_up_s: float = 0.0


WHOLE = Span()


class Workload(Struct, frozen=True):
    """What all trials share; goes to each process once."""

    rows: tuple[TraceRow, ...]
    block_tokens: int  # of the trace's hashes; 0: it has none
    catalogue: Catalogue = BUILT_IN
    profile: FittedCost | None = None
    noise: float = 0.0
    prefill_belief: float = 1.0
    decode_belief: float = 1.0


class Trial(Struct, frozen=True):
    """`seed` draws the sessions anew (0: as they are). With `give_up_below`, a run ends as soon as
    no more than that share of requests can still be effective."""

    config: Config
    seed: int = 0
    speed: float = 1.0
    span: Span = WHOLE
    give_up_below: float = 0.0


class Outcome(Struct, frozen=True):
    """`error`: why it cannot be run at all; then nothing else is meant. `gave_up`: the run ended
    early; its attainment is what could still have been reached then, so the true one is less."""

    attainment: Attainment
    misses: dict[str, int]  # by cause
    misses_by_minute: tuple[tuple[int, int, int], ...]  # minute of the trace, arrived, missed
    ttft_p50_s: float = 0.0
    ttft_p90_s: float = 0.0
    tbt_p90_s: float = 0.0
    hit_ratio: float = 0.0
    utilisation: dict[str, float] = {}  # noqa: RUF012 - msgspec copies it
    gave_up: bool = False
    error: str = ""

    @property
    def share(self) -> float:
        return self.attainment.share

    def how_far(self) -> tuple[float, int]:
        """Orders outcomes also where runs were given up at the same share: by the requests that
        it took to get there."""
        if not self.gave_up:
            return self.share, 0
        return 0.0, sum(arrived for _, arrived, _ in self.misses_by_minute)


def run_trial(trial: Trial, workload: Workload) -> Outcome:
    """Simulates. What cannot be run is an outcome with an `error`, not an exception."""
    try:
        hardware = build_hardware(
            trial.config,
            workload.profile,
            workload.catalogue,
            workload.prefill_belief,
            workload.decode_belief,
        )
        simulation = Simulation(
            trial.config,
            hardware,
            trial.seed + trial.config.conductor.seed,
            workload.noise,
            sample_s=SAMPLE_S,
        )
        span = trial.span
        rows = [
            row
            for row in resample(workload.rows, trial.seed)
            if span.begin_s - span.warm_up_s <= row.arrived_s < span.end_s
        ]
        counted = sum(row.arrived_s >= span.begin_s for row in rows)
        watcher = Watcher(simulation, span.begin_s / trial.speed, trial.speed)
        simulation.collector = watcher
        arrivals = make_arrivals(
            (row.faster(trial.speed) for row in rows),
            workload.block_tokens,
            trial.config.pool.block_tokens,
            hardware.largest_request_tokens,
        )
        most = (1.0 - trial.give_up_below) * counted if trial.give_up_below else float("inf")
        simulation.run(_until_hopeless(arrivals, watcher, most))
    except (ConfigError, TraceError) as error:
        return Outcome(Attainment(0, 0), {}, (), error=str(error))
    return _outcome(simulation, watcher, counted)


def _until_hopeless(
    arrivals: Iterator[Arrival], watcher: Watcher, most_misses: float
) -> Iterator[Arrival]:
    for arrival in arrivals:
        if watcher.num_missed > most_misses:
            watcher.gave_up = True
            return
        yield arrival


def _outcome(simulation: Simulation, watcher: Watcher, counted: int) -> Outcome:
    roles = {node.info.role for node in simulation.nodes.values()}
    span_s = max(simulation.last_end_s, 1e-9)
    utilisation = {}
    for role in Role:
        if role in roles:
            nodes = [node for node in simulation.nodes.values() if node.info.role is role]
            busy_s = sum(node.engine.figures.busy_s for node in nodes)
            utilisation[role.value] = rounded(busy_s / (len(nodes) * span_s))
    return Outcome(
        attainment=Attainment(counted, counted - watcher.num_missed),
        misses={cause.value: watcher.misses[cause] for cause in Cause if watcher.misses[cause]},
        misses_by_minute=watcher.by_minute(),
        ttft_p50_s=rounded(watcher.ttft_s.quantile(0.5)),
        ttft_p90_s=rounded(watcher.ttft_s.quantile(0.9)),
        tbt_p90_s=rounded(watcher.tbt_top10_mean_s.quantile(0.9)),
        hit_ratio=rounded(watcher.hit_tokens / max(watcher.input_tokens, 1)),
        utilisation=utilisation,
        gave_up=watcher.gave_up,
    )
