"""Runs one simulation as a unit of work: its input, its outcome, and the causes of missed SLOs.

A trial has the same outcome in any process, and an outcome is independent of the machine. A
rejected request is a miss, and a failed request too. The cause of a miss is the reason of the
rejection, or the SLO that the request broke. Whether decode lacked speed or memory follows from how
much of both was in use at that moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from math import ceil

from moonpool.config.tables import Config, ConfigError
from moonpool.cost.fitted import FittedCost
from moonpool.distributions import rounded
from moonpool.plan.confidence import Attainment
from moonpool.plan.latency_table import ClassOutcome, LatencyTable
from moonpool.request_record import RequestRecord
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.hardware.catalogue import BUILT_IN, Catalogue
from moonpool.sim.metrics import COMPLETED, Collector
from moonpool.sim.settings import SimulationSettings
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import Arrival, make_arrivals
from moonpool.trace.resample import resample
from moonpool.trace.row import TraceError, TraceRow
from moonpool.types import RequestId, Role, Struct

SAMPLE_S = 60.0  # interval of the simulation's series, which the planner does not use


class Span(Struct, frozen=True):
    """Part of a trace in seconds. Arrivals in [begin_s, end_s) are counted. Arrivals in the
    `warm_up_s` before `begin_s` are served and fill the caches, but are not counted."""

    begin_s: float = 0.0
    end_s: float = float("inf")
    warm_up_s: float = 0.0


WHOLE = Span()


class Workload(Struct, frozen=True):
    """The input that all trials share. Each process receives the workload once."""

    rows: tuple[TraceRow, ...]
    block_tokens: int  # block size of the trace's hashes, 0 without hashes
    catalogue: Catalogue = BUILT_IN
    profile: FittedCost | None = None
    noise: float = 0.0
    prefill_belief: float = 1.0
    decode_belief: float = 1.0


class Trial(Struct, frozen=True):
    """One simulation to run. `seed` gives a draw of the trace, or the original trace if it is 0. A
    run ends once less than the share `give_up_below` of its requests can be effective."""

    config: Config
    seed: int = 0
    speed: float = 1.0
    span: Span = WHOLE
    give_up_below: float = 0.0


class Outcome(Struct, frozen=True):
    """The outcome of a trial. `attainment` is the attainment of all requests. With SLO classes, it
    is the lowest attainment of a class, because the SLO of each class must be met.

    With an `error` the trial could not run, and the other fields have no meaning. If it `gave_up`,
    the run ended early, and the true attainment is less than `attainment`.
    """

    attainment: Attainment
    misses: dict[str, int]  # number of misses by cause
    misses_by_minute: tuple[tuple[int, int, int], ...]  # (minute, arrived, missed)
    ttft_p50_s: float = 0.0
    ttft_p90_s: float = 0.0
    tbt_p90_s: float = 0.0
    hit_ratio: float = 0.0
    utilisation: dict[str, float] = {}  # noqa: RUF012 - msgspec copies it
    gave_up: bool = False
    error: str = ""
    classes: tuple[ClassOutcome, ...] = ()

    @property
    def share(self) -> float:
        return self.attainment.share

    def how_far(self) -> tuple[float, int]:
        """Returns a sort key. Runs that gave up come below all others, in the order of the number
        of requests that had ended by then."""
        if not self.gave_up:
            return self.share, 0
        return 0.0, sum(arrived for _, arrived, _ in self.misses_by_minute)

    def nearly(self) -> bool:
        """Whether more than half of the requests had arrived before the failure was clear."""
        arrived = sum(number for _, number, _ in self.misses_by_minute)
        return not self.gave_up or 2 * arrived > self.attainment.num_requests


BIN_S = 60.0


class Cause(Enum):
    """The resource of which a request that missed its SLOs would have needed more."""

    PREFILL = "prefill time"
    DECODE_SPEED = "decode speed"
    DECODE_MEMORY = "decode memory"
    POOL = "room in the pool"
    DEADLINE = "time until the deadline"


def main_cause(misses: Mapping[str, int]) -> str:
    """Returns the most frequent cause, or "" if there are no misses."""
    return max(sorted(misses), key=lambda cause: misses[cause], default="")


_BY_REASON = {
    "ttft_slo": Cause.PREFILL,
    "goodput_prefill": Cause.PREFILL,
    "no_decode_capacity": Cause.DECODE_MEMORY,
    "no_prefill_capacity": Cause.POOL,
}


class StopRequestedError(RuntimeError):
    """Says that a simulation was asked to stop before its end."""


class _HopelessError(RuntimeError):
    """Says that a simulation of programs ended because it cannot reach its goal."""


class Watcher(Collector):
    """A collector that also notes why and when requests missed their SLOs.

    Requests that arrive before `begin_s` are served but not counted.
    """

    def __init__(self, simulation: Simulation, begin_s: float, speed: float) -> None:
        super().__init__()
        self.misses: Counter[Cause] = Counter()
        self.gave_up = False
        self.latencies = LatencyTable()
        self._simulation = simulation
        self._begin_s = begin_s
        self._speed = speed
        self._reasons: dict[RequestId, str] = {}
        self._arrived: Counter[int] = Counter()
        self._missed: Counter[int] = Counter()

    @property
    def num_missed(self) -> int:
        """The number of requests that missed, including the unsent calls of given-up programs."""
        return self.misses.total() + self._simulation.clients.num_never_sent

    def causes(self) -> dict[str, int]:
        """Returns the misses by cause. Calls that were never sent count with the most frequent
        cause."""
        found = self.misses.copy()
        never_sent = self._simulation.clients.num_never_sent
        if never_sent:
            found[max(Cause, key=found.__getitem__)] += never_sent
        return {cause.value: found[cause] for cause in Cause if found[cause]}

    def by_minute(self) -> tuple[tuple[int, int, int], ...]:
        """Returns (minute of the trace, arrivals, missed requests of these) for each minute."""
        minutes = sorted(self._arrived)
        return tuple((minute, self._arrived[minute], self._missed[minute]) for minute in minutes)

    def note_refused(self, request_id: RequestId, status: int, reason: str) -> None:
        self._reasons[request_id] = reason
        super().note_refused(request_id, status, reason)

    def forget(self, request_id: RequestId) -> None:
        self._reasons.pop(request_id, None)
        super().forget(request_id)

    def note_ended(self, record: RequestRecord, slo_class: str = "") -> None:
        reason = self._reasons.pop(record.request_id, "")
        if record.arrived_s < self._begin_s:
            self._prefill_s.pop(record.request_id, None)
            self._refused.pop(record.request_id, None)
            return
        super().note_ended(record, slo_class)
        self.latencies.add(record, slo_class, record.outcome in COMPLETED)
        minute = int(record.arrived_s * self._speed // BIN_S)
        self._arrived[minute] += 1
        if record.effective:
            return
        self._missed[minute] += 1
        self.misses[self._cause(record, reason)] += 1

    def _note_gaps(self, gap_runs: Sequence[tuple[float, int]]) -> None:
        """Does nothing, because outcomes do not contain gaps between tokens, and sorting all gaps
        takes time."""

    def _cause(self, record: RequestRecord, reason: str) -> Cause:
        if record.outcome in COMPLETED:
            assert record.ttft_s is not None
            late = record.ttft_s > record.slo.ttft_s
            return Cause.PREFILL if late and not self._waited_for_decode(record) else self._decode()
        if reason in _BY_REASON:
            return _BY_REASON[reason]
        if reason.startswith(
            ("decode_load", "tbt_slo", "ttft_slo_late", "goodput_decode", "batch_full")
        ):
            return self._decode()
        return Cause.DEADLINE

    def _waited_for_decode(self, record: RequestRecord) -> bool:
        """Whether the request waited more than half of the TTFT SLO between prefill and decode."""
        stages_s = record.stages_s()
        return stages_s.get("handover", 0.0) > 0.5 * record.slo.ttft_s

    def _decode(self) -> Cause:
        """Returns the cause of a slow answer: speed or memory of the decoding instances, whichever
        is nearer to its limit."""
        held = memory = 0
        step_s = 0.0
        nodes = [n for n in self._simulation.nodes.values() if n.role is not Role.PREFILL]
        block_tokens = self._simulation.hardware.layout.block_tokens
        for node in nodes:
            tokens = node.instance.pool.num_held * block_tokens
            held += tokens
            memory += min(node.info.engine_tokens or tokens, node.info.num_blocks * block_tokens)
            step_s += node.info.cost.decode_step_s(node.instance.num_running, tokens)
        slow = step_s / len(nodes) / self._simulation.config.slo.usual.tbt_s
        return Cause.DECODE_MEMORY if held > slow * max(memory, 1) else Cause.DECODE_SPEED


def run_trial(
    trial: Trial, workload: Workload, stop: Callable[[], bool] = lambda: False
) -> Outcome:
    """Simulates one trial; a trial that cannot run gives an outcome with an `error`.

    Raises StopRequestedError once `stop` says so.
    """
    try:
        hardware = build_hardware(
            trial.config,
            workload.profile,
            workload.catalogue,
            workload.prefill_belief,
            workload.decode_belief,
        )
        seed = trial.seed + trial.config.conductor.seed
        settings = SimulationSettings(noise=workload.noise, seed=seed, sample_s=SAMPLE_S)
        simulation = Simulation(trial.config, hardware, settings)
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
        most = counted - ceil(trial.give_up_below * counted - 1e-9)
        arrivals = _until_hopeless(arrivals, watcher, most, stop)
        if any(row.call for row in rows):
            with suppress(_HopelessError):
                simulation.run(arrivals, lambda record: _end_if_hopeless(watcher, most, stop))
        else:
            simulation.run(arrivals)
    except (ConfigError, TraceError) as error:
        return Outcome(Attainment(0, 0), {}, (), error=str(error))
    return _outcome(simulation, watcher, counted)


def _until_hopeless(
    arrivals: Iterator[Arrival], watcher: Watcher, most_misses: int, stop: Callable[[], bool]
) -> Iterator[Arrival]:
    for arrival in arrivals:
        if stop():
            raise StopRequestedError
        if watcher.num_missed > most_misses:
            watcher.gave_up = True
            return
        yield arrival


def _end_if_hopeless(watcher: Watcher, most_misses: int, stop: Callable[[], bool]) -> None:
    """Ends a hopeless run when a call of a program has ended, because calls that follow others are
    not read from the trace, where `_until_hopeless` would stop them."""
    if stop():
        raise StopRequestedError
    if watcher.num_missed > most_misses:
        watcher.gave_up = True
        raise _HopelessError


def _outcome(simulation: Simulation, watcher: Watcher, counted: int) -> Outcome:
    roles = {node.info.role for node in simulation.nodes.values()}
    span_s = max(simulation.last_end_s, 1e-9)
    utilisation = {}
    for role in Role:
        if role in roles:
            nodes = [node for node in simulation.nodes.values() if node.info.role is role]
            busy_s = sum(node.engine.figures.busy_s for node in nodes)
            utilisation[role.value] = rounded(busy_s / (len(nodes) * span_s))
    classes = watcher.latencies.classes()
    attainment = Attainment(counted, counted - watcher.num_missed)
    if simulation.config.slo.classes and classes and not watcher.gave_up:
        shares = [Attainment(one.num_requests, one.num_effective) for one in classes]
        attainment = min(shares, key=lambda one: one.share)
    return Outcome(
        attainment=attainment,
        misses=watcher.causes(),
        misses_by_minute=watcher.by_minute(),
        ttft_p50_s=rounded(watcher.ttft_s.quantile(0.5)),
        ttft_p90_s=rounded(watcher.ttft_s.quantile(0.9)),
        tbt_p90_s=rounded(watcher.tbt_top10_mean_s.quantile(0.9)),
        hit_ratio=rounded(watcher.hit_tokens / max(watcher.input_tokens, 1)),
        utilisation=utilisation,
        gave_up=watcher.gave_up,
        classes=classes,
    )
