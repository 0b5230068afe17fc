"""Whether the SSD tier stalls decoding: time between tokens with and without heavy traffic to disk.

One real instance in this process: engine, state machine, arena and SSD store, driven as a worker
drives them. The instance decodes a few long answers all the time, while short phases take turns,
many times. A quiet phase comes before each of these:

- arrivals: at a set pace, prompts arrive as if streamed from a prefill instance, and push others
  out of DRAM. The SSD tier is off.
- demotion: the same, and evicted blocks go to the SSD.
- promotion: at the same pace, peers request blocks that are on the SSD only.

No process computes the blocks that arrive or receives the requested ones, so the phases differ only
in the instance's own work. Each is compared with the quiet time just before it. The confidence of
the difference comes from a bootstrap over the rounds.
"""

from __future__ import annotations

import queue
import random
import secrets
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.errors import BenchError
from moonpool.config.tables import (
    EngineConfig,
    ModelConfig,
    MooncakeConfig,
    NetworkConfig,
    PoolConfig,
    SloConfig,
)
from moonpool.distributions import interpolated
from moonpool.gc_tuning import settle_memory, settle_threads
from moonpool.protocol.block_layout import block_keys, root_key
from moonpool.protocol.frames import Setup
from moonpool.protocol.messages import (
    Abort,
    AttemptSpec,
    ReserveDecode,
    StartPrefill,
    StepTokens,
)
from moonpool.protocol.transfer_events import (
    ReadEnded,
    ReadRequested,
    ReceiveEnded,
    TierPaused,
    TierResumed,
)
from moonpool.scheduler.actions import (
    ExpectStream,
    GrantRead,
    RunStep,
    SendReport,
    StepEnded,
    WorkerEvent,
)
from moonpool.scheduler.instance import InstanceDriver, Performers
from moonpool.types import InstanceId, Role, SamplingParams
from moonpool_engine.engine.device_choice import resolve_dtype
from moonpool_engine.engine.runner import Engine
from moonpool_engine.storage.tier_store import TierStore
from moonpool_engine.transfer.local_peer import LocalPeer
from moonpool_engine.worker.engine_boot import BootError, InstancePlace
from moonpool_engine.worker.engine_thread import EngineThread
from moonpool_engine.worker.instance_boot import BootedInstance, boot_instance
from moonpool_engine.worker.transfers import storage_by
from moonpool_lab.solo import solo_attempt

LIMIT = 1.10
"""P99 under load over P99 in quiet."""
BUSY = ("arrivals", "demotion", "promotion")
DRAWS = 400
"""How often the rounds are drawn, for the interval in which nine of ten ratios lie."""
PROMPT_TOKENS = 256
ARRIVING_TOKENS = 1024
DRAM_TOKENS = 32_768
SSD_TOKENS = 131_072
KEPT_PROMPTS = SSD_TOKENS // ARRIVING_TOKENS
MIN_STEPS = 100
"""With fewer steps, a P99 means nothing."""
SETTLE_S = 0.3
"""Seconds at the start of a phase that are not measured, in which operations of the last phase
end."""
_ENDLESS = 1 << 20


def bench_demotion(
    model: str,
    batch: int,
    phase_s: float,
    rounds: int,
    tokens_per_s: int,
    folder: Path | None,
    echo: Callable[[str], None],
) -> dict[str, Any]:
    """Returns the gaps of each phase, over all rounds. Raises BenchError."""
    settle_threads()
    with tempfile.TemporaryDirectory(prefix="moonpool-bench-", dir=folder) as name:
        bench = _Bench(model, tokens_per_s, Path(name))
        try:
            pairs = bench.run(batch, phase_s, rounds)
        finally:
            bench.close()
    rows = [_quiet_row(pairs), *(_busy_row(phase, pairs[phase]) for phase in BUSY)]
    for row in rows:
        low, high = row["p99_between"]
        echo(
            f"{row['phase']:<10} {row['steps']:>6} steps, TBT P50 {row['p50_s'] * 1e3:.2f} ms,"
            f" P99 {row['p99_s'] * 1e3:.2f} (engine {row['engine_p99_s'] * 1e3:.2f}),"
            f" {row['p99_over_quiet']:.2f} of quiet ({low:.2f} to {high:.2f}), longest"
            f" {row['max_s'] * 1e3:.1f}; written {row['written_mb_per_s']:.0f} MB/s, read"
            f" {row['read_mb_per_s']:.0f}"
        )
    return {
        "model": model,
        "batch": batch,
        "tokens_per_s": tokens_per_s,
        "limit": LIMIT,
        "within_limit": all(row["p99_over_quiet"] <= LIMIT for row in rows),
        "rows": rows,
    }


def _quiet_row(pairs: dict[str, list[_Pair]]) -> dict[str, Any]:
    quiet = [pair.quiet for phase in BUSY for pair in pairs[phase]]
    return {**_row("quiet", quiet), "p99_over_quiet": 1.0, "p99_between": (1.0, 1.0)}


def _busy_row(phase: str, pairs: list[_Pair]) -> dict[str, Any]:
    def ratio(drawn: Sequence[_Pair]) -> float:
        busy_s, quiet_s = _gaps_s(p.busy for p in drawn), _gaps_s(p.quiet for p in drawn)
        return interpolated(sorted(busy_s), 0.99) / interpolated(sorted(quiet_s), 0.99)

    row = _row(phase, [pair.busy for pair in pairs])
    _gaps_enough("quiet", _gaps_s(pair.quiet for pair in pairs))
    rng = random.Random(0)
    ratios = sorted(ratio(rng.choices(pairs, k=len(pairs))) for _ in range(DRAWS))
    between = (round(ratios[DRAWS // 20], 3), round(ratios[-1 - DRAWS // 20], 3))
    return {**row, "p99_over_quiet": round(ratio(pairs), 3), "p99_between": between}


def _gaps_s(phases: Iterable[_Phase]) -> list[float]:
    return [gap_s for phase in phases for gap_s in phase.gaps_s]


def _gaps_enough(phase: str, gaps_s: list[float]) -> None:
    if len(gaps_s) < MIN_STEPS:
        raise BenchError(f"only {len(gaps_s)} tokens came during {phase}; let it run longer")


def _row(phase: str, phases: list[_Phase]) -> dict[str, Any]:
    gaps_s = sorted(_gaps_s(phases))
    _gaps_enough(phase, gaps_s)
    engine_s = [step_s for one in phases for step_s in one.engine_s]
    seconds = sum(one.seconds for one in phases)
    return {
        "phase": phase,
        "steps": len(gaps_s),
        "mean_s": statistics.fmean(gaps_s),
        "p50_s": interpolated(gaps_s, 0.5),
        "p99_s": interpolated(gaps_s, 0.99),
        "max_s": gaps_s[-1],
        "engine_p99_s": interpolated(sorted(engine_s), 0.99),
        "written_mb_per_s": round(sum(one.written_bytes for one in phases) / seconds / 1e6, 1),
        "read_mb_per_s": round(sum(one.read_bytes for one in phases) / seconds / 1e6, 1),
    }


@dataclass(slots=True)
class _Phase:
    """The samples of one phase: time between tokens, and the engine's time of each step."""

    gaps_s: list[float] = field(default_factory=list)
    engine_s: list[float] = field(default_factory=list)
    seconds: float = 0.0
    written_bytes: int = 0
    read_bytes: int = 0


class _Pair(NamedTuple):
    quiet: _Phase
    busy: _Phase


class _Bench:
    """The instance and the requests that it gets. `run` once, then `close`."""

    def __init__(self, model: str, tokens_per_s: int, folder: Path) -> None:
        setup = Setup(
            model=msgspec.structs.replace(ModelConfig(name=model), dtype=resolve_dtype("auto")),
            pool=PoolConfig(
                dram_tokens_per_instance=DRAM_TOKENS,
                ssd_tokens_per_instance=SSD_TOKENS,
                ssd_folder=str(folder),
            ),
            network=NetworkConfig(),
            mooncake=MooncakeConfig(),
            engine=EngineConfig(threads=1),
            slo=SloConfig(),
            learning=True,
            num_instances=1,
            num_processes=1,
        )
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        post = self._events.put
        name, secret = InstanceId("bench-0"), secrets.token_bytes(16)
        lost: list[str] = []  # of its stages: there is one, which is this process
        try:
            self._booted: BootedInstance = boot_instance(
                setup,
                InstancePlace(LocalPeer(name, secret), Role.MIXED),
                post,
                lost.append,
            )
        except BootError as error:
            raise BenchError(str(error)) from None
        booted = self._booted
        built = booted.built
        if booted.tier.store is None:
            booted.close()
            raise BenchError(booted.tier.error)
        assert isinstance(built.engine, Engine)
        self._engine = EngineThread(built.engine, booted.messenger, built.threads, post)
        self._engine.start()
        self._driver = self._drive(booted.tier.store)
        self._rng = random.Random(0)
        self._num_works = 0
        self._num_reads = 0
        self._step_s = ARRIVING_TOKENS / tokens_per_s
        self._next_s = 0.0
        self._seen = _Phase()
        self._last_s = 0.0
        self._arrived: deque[tuple[int, ...]] = deque(maxlen=KEPT_PROMPTS)
        settle_memory()

    def close(self) -> None:
        self._engine.stop(timeout_s=5.0)
        self._booted.close()

    def run(self, batch: int, phase_s: float, rounds: int) -> dict[str, list[_Pair]]:
        """Returns the gaps by busy phase; each round has one of each."""
        for _ in range(batch):
            tokens = self._draw(PROMPT_TOKENS)
            self._handle(StartPrefill(attempt=self._work(tokens, _ENDLESS)))
        self._phase("demotion", phase_s)  # fills DRAM, and the SSD for promotion
        pairs: dict[str, list[_Pair]] = {phase: [] for phase in BUSY}
        for number in range(rounds):
            first = number % len(BUSY)
            for phase in BUSY[first:] + BUSY[:first]:
                quiet = self._phase("quiet", phase_s)
                pairs[phase].append(_Pair(quiet, self._phase(phase, phase_s)))
        return pairs

    def _phase(self, phase: str, seconds: float) -> _Phase:
        store = self._booted.tier.store
        assert store is not None
        self._handle(TierPaused(error="off") if phase == "arrivals" else TierResumed())
        self._until(time.monotonic() + SETTLE_S, phase)
        before, began_s = store.counts(), time.monotonic()
        self._seen = seen = _Phase()
        self._until(began_s + seconds, phase)
        after = store.counts()
        seen.seconds = time.monotonic() - began_s
        seen.written_bytes = after.written_bytes - before.written_bytes
        seen.read_bytes = after.read_bytes - before.read_bytes
        return seen

    def _until(self, end_s: float, phase: str) -> None:
        while (left_s := end_s - time.monotonic()) > 0:
            due_s = self._next_s - time.monotonic()
            if phase != "quiet" and due_s <= 0:
                self._next_s = max(self._next_s, time.monotonic() - self._step_s) + self._step_s
                if phase == "promotion":
                    self._ask()
                else:
                    self._arrive()
                continue
            wait_s = left_s if phase == "quiet" else min(left_s, due_s)
            try:
                self._handle(self._events.get(timeout=wait_s))
            except queue.Empty:
                continue

    def _handle(self, event: WorkerEvent) -> None:
        if isinstance(event, StepEnded):
            self._seen.engine_s.append(event.seconds)
        self._driver.post(event)

    def _drive(self, store: TierStore) -> InstanceDriver:
        def arrived(action: ExpectStream) -> None:  # all of it is here at once
            self._events.put(ReceiveEnded(stream_id=action.stream_id))

        def read(action: GrantRead) -> None:  # the peer takes no time
            self._events.put(ReadEnded(read_id=action.read_id))

        performers: Performers = {
            **storage_by(store),
            RunStep: self._engine.submit,
            ExpectStream: arrived,
            GrantRead: read,
            SendReport: self._hear,
        }
        return InstanceDriver(self._booted.instance, time.monotonic, performers)

    def _hear(self, action: SendReport) -> None:
        if isinstance(action.report, StepTokens):
            now_s = time.monotonic()
            self._seen.gaps_s.append(now_s - self._last_s)
            self._last_s = now_s

    # Load

    def _arrive(self) -> None:
        """Lets a prompt's KVCache arrive. The checksums are known, because every slice was hashed
        on its way."""
        tokens = self._draw(ARRIVING_TOKENS)
        work = self._work(tokens, 1)
        self._handle(ReserveDecode(attempt=work))
        self._events.put(Abort(attempt_id=work.attempt_id))  # after what has arrived was named
        self._arrived.append(tokens)

    def _ask(self) -> None:
        """Asks for the prompt that arrived longest ago."""
        if self._arrived:
            layout, tokens = self._booted.built.arena.layout, self._arrived[0]
            self._arrived.rotate(-1)
            keys = block_keys(tokens, layout.block_tokens, root_key(layout.fingerprint, ""))
            self._num_reads += 1
            self._handle(ReadRequested(read_id=f"r{self._num_reads}", keys=tuple(keys)))

    def _draw(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randbytes(count))

    def _work(self, tokens: tuple[int, ...], num_tokens: int) -> AttemptSpec:
        self._num_works += 1
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        return solo_attempt(f"w{self._num_works}", tokens, sampling, timeout_s=60.0)
