"""Describes a local cluster for live measurements, with its simulated twin, workload and profile.

One description starts the live cluster and configures the simulation; both serve the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, TypeVar

import msgspec
import uvloop

from moonpool.config.parse import parse_config
from moonpool.config.tables import Admission, Config
from moonpool.cost.fitted import OffloadParts
from moonpool.sim.hardware.build import Hardware, build_hardware
from moonpool.sim.outcome import summarise
from moonpool.sim.settings import SimulationSettings
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import make_arrivals
from moonpool.trace.builtin import CONVERSATION
from moonpool.trace.generate import BLOCK_TOKENS, generate
from moonpool.trace.reader import open_trace
from moonpool.trace.row import TraceError, TraceRow
from moonpool.trace.transform import scale_rows, scale_trace
from moonpool.types import Slo, Struct
from moonpool_lab.profiling.live_profile import LiveProfile, LiveProfiler

UNBOUNDED = Slo(ttft_s=1e5, tbt_s=1e5)


class LiveCluster(Struct, frozen=True):
    """The settings of the live and the simulated cluster. The block sizes of the pool and of the
    scaled trace must divide one another."""

    model: str = "random:m30"
    prefill: int = 1
    decode: int = 1
    mixed: int = 0
    attention: int = 0
    attention_own_tokens: int = 0
    kv_tokens: int = 65_536
    block_tokens: int = 16
    chunk_tokens: int = 512
    max_sequences: int = 128
    threads: int = 1
    admission: Admission = "early"
    slo: Slo = UNBOUNDED

    def arguments(self) -> list[str]:
        """Returns the arguments of `moonpool serve`."""
        options = {
            "--prefill": self.prefill,
            "--decode": self.decode,
            "--mixed": self.mixed,
            "--attention": self.attention,
            "--attention-own-tokens": self.attention_own_tokens,
            "--kv-tokens": self.kv_tokens,
            "--block-size": self.block_tokens,
            "--max-num-batched-tokens": self.chunk_tokens,
            "--max-num-seqs": self.max_sequences,
            "--threads": self.threads,
            "--admission": self.admission,
            "--slo-ttft": self.slo.ttft_s,
            "--slo-tbt": self.slo.tbt_s,
        }
        return [self.model, *(str(word) for pair in options.items() for word in pair)]

    def config(self, profile: LiveProfile) -> Config:
        """Returns the configuration of the simulation."""
        tables: dict[str, dict[str, Any]] = {
            "cluster": {
                "prefill": self.prefill,
                "decode": self.decode,
                "mixed": self.mixed,
                "attention": self.attention,
            },
            "attention": {"own_tokens": self.attention_own_tokens},
            "pool": {
                "block_tokens": self.block_tokens,
                "dram_tokens_per_instance": profile.num_blocks * profile.block_tokens,
            },
            "engine": {"chunk_tokens": self.chunk_tokens, "max_sequences": self.max_sequences},
            "conductor": {"admission": self.admission},
            "slo": msgspec.to_builtins(self.slo),
            "hardware": {"cost": "profile.json"},
        }
        return parse_config("", tables)

    def hardware(self, profile: LiveProfile) -> Hardware:
        """Returns the measured hardware, with the live Conductor's estimates of its costs."""
        hardware = build_hardware(self.config(profile), profile.cost)
        estimate = profile.believed
        return replace(
            hardware,
            prefill=replace(hardware.prefill, estimate=estimate),
            decode=replace(hardware.decode, estimate=estimate),
            mixed=replace(hardware.mixed, estimate=estimate),
        )

    def with_(self, **changes: Any) -> LiveCluster:
        changed: LiveCluster = msgspec.structs.replace(self, **changes)
        return changed

    @property
    def words(self) -> str:
        counts = {"P": self.prefill, "D": self.decode, "M": self.mixed, "A": self.attention}
        return "+".join(f"{count}{letter}" for letter, count in counts.items() if count)


ATTAINED = 0.9
FIRST_RATE = 1.0
ENOUGH_REQUESTS = 2000.0
"""The most requests of one simulation. More requests would hardly make a share of 90 % more
certain."""
BURST_EVERY_S = 10.0
BURST_SHARE = 0.2
TTFT_FACTOR, TBT_FACTOR = 10.0, 5.0
"""SLOs as multiples of the unloaded P90s (FAST'25 section 5)."""


class LiveWorkload(Struct, frozen=True):
    """A conversation-like workload, or a trace's file with its arrivals sped up to the rate."""

    scale: Fraction = Fraction(1, 32)
    seed: int = 1
    trace_file: str = ""
    longest_tokens: int = 0  # drops longer scaled requests; 0 keeps all
    burst: float = 1.0
    """The density of arrivals in the first fifth of every ten seconds over the mean; at most 5."""
    prompts: int = 0
    answers: int = 0
    """The tokens of every prompt and answer, with prompts that share nothing. 0 keeps the prompts
    and answers of the workload."""

    @property
    def block_tokens(self) -> int:
        return int(self._source_block_tokens * self.scale)

    @property
    def _source_block_tokens(self) -> int:
        return open_trace(self.trace_file).info.block_tokens if self.trace_file else BLOCK_TOKENS

    def rows(self, rate_rps: float, seconds: float) -> tuple[TraceRow, ...]:
        """Returns requests at this rate for this time. Raises TraceError."""
        if not self.trace_file:
            generated = generate(
                CONVERSATION, duration_s=seconds, seed=self.seed, rate_rps=rate_rps
            )
            return self._kept(list(scale_rows(generated, self.scale)))
        trace = open_trace(self.trace_file)
        if not trace.info.duration_s:
            raise TraceError(f"{self.trace_file}: all requests come at once, so it has no rate")
        speed = rate_rps * trace.info.duration_s / trace.info.num_rows
        faster = scale_trace(open_trace(self.trace_file, speed=speed), self.scale)
        return self._kept([row for row in faster if row.arrived_s <= seconds])

    def _kept(self, rows: Sequence[TraceRow]) -> tuple[TraceRow, ...]:
        most = self.longest_tokens
        sized = (self._sized(number, row) for number, row in enumerate(rows))
        kept = (r for r in sized if not most or r.input_tokens + r.output_tokens <= most)
        return tuple(
            msgspec.structs.replace(r, arrived_s=_in_bursts(r.arrived_s, self.burst)) for r in kept
        )

    def _sized(self, number: int, row: TraceRow) -> TraceRow:
        if self.answers:
            row = msgspec.structs.replace(row, output_tokens=self.answers)
        if self.prompts:
            num_blocks = -(-self.prompts // self.block_tokens)
            ids = tuple(range(number * num_blocks, (number + 1) * num_blocks))
            row = msgspec.structs.replace(row, input_tokens=self.prompts, hash_ids=ids)
        return row

    def with_(self, **changes: Any) -> LiveWorkload:
        changed: LiveWorkload = msgspec.structs.replace(self, **changes)
        return changed


def _in_bursts(even_s: float, burst: float) -> float:
    """Moves an arrival into the bursts; order and mean rate stay the same."""
    period, phase = divmod(even_s, BURST_EVERY_S)
    dense_s = BURST_EVERY_S * BURST_SHARE
    if phase < burst * dense_s:
        phase /= burst
    else:
        rest = (phase - burst * dense_s) / (BURST_EVERY_S - burst * dense_s)
        phase = dense_s + rest * (BURST_EVERY_S - dense_s)
    return period * BURST_EVERY_S + phase


def simulate_rows(
    cluster: LiveCluster, profile: LiveProfile, rows: Sequence[TraceRow], block_tokens: int
) -> tuple[dict[str, Any], Simulation]:
    """Simulates the cluster with these rows; returns the figures and the simulation."""
    hardware = cluster.hardware(profile)
    settings = SimulationSettings(sample_s=SAMPLE_S, capped_answers=True)
    simulation = Simulation(cluster.config(profile), hardware, settings)
    largest = hardware.largest_request_tokens
    simulation.run(make_arrivals(rows, block_tokens, cluster.block_tokens, largest))
    return summarise(simulation, 0.0), simulation


SAMPLE_S = 0.5
"""Seconds between two samples of the load, live and simulated."""


def unloaded_slo(figures: dict[str, Any]) -> Slo:
    """Returns the paper's SLOs from a run without load."""
    return Slo(
        ttft_s=TTFT_FACTOR * figures["ttft_s"]["p90"], tbt_s=TBT_FACTOR * figures["tbt_s"]["p90"]
    )


def estimate_capacity(
    cluster: LiveCluster, profile: LiveProfile, workload: LiveWorkload, seconds: float, slo: Slo
) -> float:
    """Returns the highest rate (requests/s) at which 90 % of requests meet the SLOs without
    admission control, within 5 %.

    The search bisects over simulations of `seconds`, or of the time that ENOUGH_REQUESTS take.
    """
    free = cluster.with_(admission="none", slo=slo)

    def holds(rate_rps: float) -> bool:
        rows = workload.rows(rate_rps, min(seconds, ENOUGH_REQUESTS / rate_rps))
        if not rows:
            return True
        figures, _ = simulate_rows(free, profile, rows, workload.block_tokens)
        return bool(figures["effective"] >= ATTAINED * figures["requests"])

    low = high = FIRST_RATE
    while holds(high) and high < 1e4:
        low, high = high, high * 2
    while not holds(low) and low > 1e-3:
        low, high = low / 2, low
    while high > 1.05 * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


Say = Callable[[str], None]
T = TypeVar("T")


def measure_live(
    url: str, workload: LiveWorkload, say: Say, ca_file: str = "", api_key: str = ""
) -> LiveProfile:
    """Measures the cluster's profile, and passes a line about it to `say`."""
    profiler = LiveProfiler(url, workload.longest_tokens or 4096, ca_file, api_key)
    profile = uvloop.run(profiler.measure())
    prefill, decode = profile.cost.contention
    error = profile.fit_error
    say(
        f"profile in {profile.seconds:.0f} s: with busy neighbours prefill takes {prefill:.2f},"
        f" decode {decode:.2f} times as long; a message {1e3 * profile.cost.control_latency_s:.2f}"
        f" ms, HTTP {1e3 * profile.cost.front_s:.2f} ms; fit within {error['prefill']:.0%} and"
        f" {error['decode']:.0%}"
    )
    return profile


def with_parts(profile: LiveProfile, parts: OffloadParts) -> LiveProfile:
    """Returns the profile with the measured parts of steps with attention workers."""
    parts = msgspec.structs.replace(
        parts,
        seen_workers=profile.attention_workers,
        seen_own_tokens=profile.attention_own_tokens,
    )
    cost = msgspec.structs.replace(profile.cost, offload=parts)
    return msgspec.structs.replace(profile, cost=cost)
