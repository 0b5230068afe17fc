"""What a live benchmark sends: scaled rows, the same for life and simulation.

Owns the draw and the capacity's estimate by simulation. Sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import msgspec

from moonpool.bench.live_cluster import LiveCluster
from moonpool.bench.live_profile import LiveProfile
from moonpool.sim.outcome import summarise
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import make_arrivals
from moonpool.trace.builtin import CONVERSATION
from moonpool.trace.generate import BLOCK_TOKENS, generate
from moonpool.trace.reader import open_trace
from moonpool.trace.row import TraceError, TraceRow
from moonpool.trace.scale import scale_rows, scale_trace
from moonpool.types import Slo, Struct

ATTAINED = 0.9
FIRST_RATE = 1.0
ENOUGH_REQUESTS = 2000.0
"""Of one simulation: more would not tell a share of nine in ten any better."""
BURST_EVERY_S = 10.0
BURST_SHARE = 0.2
TTFT_FACTOR, TBT_FACTOR = 10.0, 5.0
"""SLOs as multiples of the unloaded P90s (FAST'25 section 5)."""


class LiveWorkload(Struct, frozen=True):
    """A conversation-like workload, or a trace's file with its arrivals sped up to the rate."""

    scale: Fraction = Fraction(1, 32)
    seed: int = 1
    trace_file: str = ""
    longest_tokens: int = 0  # of prompt and answer, scaled; longer requests are left out; 0: none
    burst: float = 1.0
    """By how much arrivals come denser in the first fifth of every ten seconds; at most 5."""
    prompts: int = 0
    answers: int = 0
    """Of just so many tokens, instead of those drawn; prompts then share nothing. 0: as drawn."""

    @property
    def block_tokens(self) -> int:
        return int(self._source_block_tokens * self.scale)

    @property
    def _source_block_tokens(self) -> int:
        return open_trace(self.trace_file).info.block_tokens if self.trace_file else BLOCK_TOKENS

    def rows(self, rate_rps: float, seconds: float) -> tuple[TraceRow, ...]:
        """So many requests a second for so long. Raises TraceError."""
        if not self.trace_file:
            drawn = generate(CONVERSATION, duration_s=seconds, seed=self.seed, rate_rps=rate_rps)
            return self._kept(list(scale_rows(drawn, self.scale)))
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
    """Order and mean rate stay as they are."""
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
    """Figures of the cluster's twin under these rows, and the simulation itself."""
    hardware = cluster.hardware(profile)
    simulation = Simulation(cluster.config(profile), hardware, sample_s=SAMPLE_S, capped=True)
    largest = hardware.largest_request_tokens
    simulation.run(make_arrivals(rows, block_tokens, cluster.block_tokens, largest))
    return summarise(simulation, 0.0), simulation


SAMPLE_S = 0.5
"""How often loads are sampled, live and simulated."""


def unloaded_slo(figures: dict[str, Any]) -> Slo:
    """The paper's SLOs from a run without load."""
    return Slo(
        ttft_s=TTFT_FACTOR * figures["ttft_s"]["p90"], tbt_s=TBT_FACTOR * figures["tbt_s"]["p90"]
    )


def estimate_capacity(
    cluster: LiveCluster, profile: LiveProfile, workload: LiveWorkload, seconds: float, slo: Slo
) -> float:
    """The highest rate (requests/s) at which nine of ten requests meet the SLOs with no admission
    control, by bisection over simulations of `seconds`, or as many as it takes for
    ENOUGH_REQUESTS, to within 5 %."""
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
