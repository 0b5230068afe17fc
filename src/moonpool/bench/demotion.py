"""Whether the SSD tier stalls decoding: time between tokens with and without heavy traffic to disk.

One real instance in this process: engine, state machine, arena and SSD store, driven as a worker
drives them. It decodes a few long answers all the time, while phases take turns: quiet; *arrivals*
(prompts arrive as if streamed from a prefill instance, at a set pace, and push others out of DRAM,
while the SSD tier is off); *demotion* (the same, and what is pushed out goes to the SSD);
*promotion* (peers ask for what is on the SSD only, at the same pace). What arrives is computed
nowhere and what is asked for goes to nobody: the phases differ by the instance's own work alone.
"""

from __future__ import annotations

import queue
import random
import secrets
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from moonpool.config import (
    EngineConfig,
    ModelConfig,
    MooncakeConfig,
    NetworkConfig,
    PoolConfig,
    SloConfig,
)
from moonpool.engine.dtype import resolve_dtype
from moonpool.engine.runner import Engine
from moonpool.kvcache.hashing import block_keys, root_key
from moonpool.kvcache.transfers import (
    ReadEnded,
    ReadRequested,
    ReceiveEnded,
    TierPaused,
    TierResumed,
)
from moonpool.runtime.cores import CoreShare
from moonpool.runtime.engine_thread import EngineThread
from moonpool.runtime.instance_boot import BootedInstance, BootError, boot_instance
from moonpool.runtime.protocol import Setup
from moonpool.runtime.settle import settle_memory
from moonpool.runtime.transfers import perform_storage
from moonpool.types import BlockKey, InstanceId, Role, SamplingParams, Slo
from moonpool.workers.actions import (
    ExpectStream,
    ForgetStored,
    GrantRead,
    LoadBlocks,
    RunStep,
    StoreBlocks,
    Tell,
    WorkerAction,
    WorkerEvent,
)
from moonpool.workers.messages import (
    Abort,
    ReserveDecode,
    StartPrefill,
    StepTokens,
    Work,
    WorkId,
)

LIMIT = 1.10
"""P99 under load over P99 in quiet."""
PHASES = ("quiet", "arrivals", "demotion", "promotion")
PROMPT_TOKENS = 256
ARRIVING_TOKENS = 1024
DRAM_TOKENS = 32_768
SSD_TOKENS = 131_072
KEPT_PROMPTS = SSD_TOKENS // ARRIVING_TOKENS
MIN_STEPS = 100
"""Below that, there is no P99 to speak of."""
SETTLE_S = 0.3
"""At the begin of a phase, not measured: what the one before began ends meanwhile."""
_ENDLESS = 1 << 20
_FREE = Slo(ttft_s=float("inf"), tbt_s=float("inf"))


class DemotionBenchError(RuntimeError):
    """The run did not do what it is meant to measure."""


def bench_demotion(
    model: str,
    batch: int,
    phase_s: float,
    rounds: int,
    tokens_per_s: int,
    folder: Path | None,
    echo: Callable[[str], None],
) -> dict[str, Any]:
    """Gaps of each phase, over all rounds. Raises DemotionBenchError."""
    with tempfile.TemporaryDirectory(prefix="moonpool-bench-", dir=folder) as name:
        bench = _Bench(model, tokens_per_s, Path(name))
        try:
            gaps, moved = bench.run(batch, phase_s, rounds)
        finally:
            bench.close()
    rows = [_row(phase, gaps[phase], moved[phase]) for phase in PHASES]
    quiet_s = rows[0]["p99_s"]
    for row in rows:
        row["p99_over_quiet"] = round(row["p99_s"] / quiet_s, 3)
        echo(
            f"{row['phase']:<10} {row['steps']:>6} steps, TBT P50 {row['p50_s'] * 1e3:.2f} ms,"
            f" P99 {row['p99_s'] * 1e3:.2f} ({row['p99_over_quiet']:.2f} of quiet), longest"
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


def _row(phase: str, gaps_s: list[float], moved: tuple[float, float]) -> dict[str, Any]:
    if len(gaps_s) < MIN_STEPS:
        raise DemotionBenchError(
            f"only {len(gaps_s)} tokens came during {phase}; let it run longer"
        )
    return {
        "phase": phase,
        "steps": len(gaps_s),
        "mean_s": statistics.fmean(gaps_s),
        "p50_s": float(np.percentile(gaps_s, 50)),
        "p99_s": float(np.percentile(gaps_s, 99)),
        "max_s": max(gaps_s),
        "written_mb_per_s": round(moved[0] / 1e6, 1),
        "read_mb_per_s": round(moved[1] / 1e6, 1),
    }


class _Bench:
    """The instance and what is asked of it. `run` once, then `close`."""

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
                setup, Role.MIXED, name, "127.0.0.1", secret, post, 1, lost.append, CoreShare()
            )
        except BootError as error:
            raise DemotionBenchError(str(error)) from None
        booted = self._booted
        if booted.store is None:
            booted.close()
            raise DemotionBenchError(booted.store_error)
        assert isinstance(booted.engine, Engine)
        self._engine = EngineThread(booted.engine, booted.messenger, (), booted.threads, post)
        self._engine.start()
        self._rng = random.Random(0)
        self._num_works = 0
        self._num_reads = 0
        self._step_s = ARRIVING_TOKENS / tokens_per_s
        self._next_s = 0.0
        self._gaps_s: list[float] = []
        self._last_s = 0.0
        self._demoted: deque[list[BlockKey]] = deque(maxlen=KEPT_PROMPTS)
        settle_memory()

    def close(self) -> None:
        self._engine.stop(timeout_s=5.0)
        self._booted.close()

    def run(
        self, batch: int, phase_s: float, rounds: int
    ) -> tuple[dict[str, list[float]], dict[str, tuple[float, float]]]:
        """Gaps between tokens, and bytes a second written and read, by phase."""
        for _ in range(batch):
            tokens = self._draw(PROMPT_TOKENS)
            self._handle(StartPrefill(work=self._work(tokens, _ENDLESS)))
        self._phase("demotion", phase_s)  # fills DRAM, and gives promotion something to read
        gaps: dict[str, list[float]] = {phase: [] for phase in PHASES}
        moved = dict.fromkeys(PHASES, (0.0, 0.0))
        for number in range(rounds):
            first = number % len(PHASES)
            for phase in PHASES[first:] + PHASES[:first]:
                found, written, read = self._phase(phase, phase_s)
                gaps[phase] += found
                so_far = moved[phase]
                moved[phase] = (so_far[0] + written / rounds, so_far[1] + read / rounds)
        return gaps, moved

    def _phase(self, phase: str, seconds: float) -> tuple[list[float], float, float]:
        store = self._booted.store
        assert store is not None
        self._handle(TierPaused(error="off") if phase == "arrivals" else TierResumed())
        self._until(time.monotonic() + SETTLE_S, phase)
        before, began_s = store.counts(), time.monotonic()
        self._gaps_s = []
        self._until(began_s + seconds, phase)
        took_s, after = time.monotonic() - began_s, store.counts()
        written = (after.written_bytes - before.written_bytes) / took_s
        return self._gaps_s, written, (after.read_bytes - before.read_bytes) / took_s

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
        for action in self._booted.instance.handle(event, time.monotonic()):
            self._perform(action)

    def _perform(self, action: WorkerAction) -> None:
        store = self._booted.store
        assert store is not None
        match action:
            case RunStep():
                self._engine.submit(action)
            case StoreBlocks() | LoadBlocks() | ForgetStored():
                perform_storage(store, action)
            case ExpectStream():  # all of it is here at once
                self._events.put(ReceiveEnded(stream_id=action.stream_id))
            case GrantRead():  # the peer takes no time
                self._events.put(ReadEnded(read_id=action.read_id))
            case Tell() if isinstance(action.report, StepTokens):
                now_s = time.monotonic()
                self._gaps_s.append(now_s - self._last_s)
                self._last_s = now_s

    # Load

    def _arrive(self) -> None:
        """A prompt's KVCache. As every slice has been hashed on its way, the sums are known."""
        tokens = self._draw(ARRIVING_TOKENS)
        work = self._work(tokens, 1)
        self._handle(ReserveDecode(work=work))
        self._events.put(Abort(work_id=work.work_id))  # after what has arrived was named
        layout = self._booted.layout
        keys = block_keys(tokens, layout.block_tokens, root_key(layout.fingerprint, ""))
        self._demoted.append(keys)

    def _ask(self) -> None:
        """For a prompt that arrived longest ago."""
        if self._demoted:
            keys = self._demoted.popleft()
            self._demoted.append(keys)
            self._num_reads += 1
            self._handle(ReadRequested(read_id=f"r{self._num_reads}", keys=tuple(keys)))

    def _draw(self, count: int) -> tuple[int, ...]:
        return tuple(self._rng.randrange(250) for _ in range(count))

    def _work(self, tokens: tuple[int, ...], num_tokens: int) -> Work:
        self._num_works += 1
        return Work(
            work_id=WorkId(f"w{self._num_works}"),
            token_ids=tokens,
            num_prompt_tokens=len(tokens),
            sampling=SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True),
            slo=_FREE,
            tenant="",
            use_cache=True,
            timeout_s=60.0,
        )
