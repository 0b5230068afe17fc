"""Predicts by simulation how a measured server answers several loads, before they are tried.

The simulator gets the cluster that a moonpool server states. For another server, it gets one mixed
instance that admits everything. So a forecast needs no other model of a server than the simulator.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from math import lcm
from pathlib import Path
from typing import Any

import msgspec

from moonpool.config.tables import Config
from moonpool.cost.fitted import Profile
from moonpool.cost.recorded import InstanceRecord
from moonpool.studies.cluster import cluster_config
from moonpool.studies.run import RunSettings, run_simulation
from moonpool.studies.trace_rows import TraceRows
from moonpool.types import Slo, Struct
from moonpool_lab.forecast.measured_server import MeasuredServer
from moonpool_lab.forecast.stated_costs import record_of

ATTAINMENT = 0.9
"""The capacity is the highest rate at which this share of the requests meets both SLOs."""
SLO_FACTORS = (10.0, 5.0)
"""The unstated SLOs of TTFT and TBT as multiples of their P90 without load, as in Mooncake."""
ALONE_SPEED = 1e-4
"""At this multiple of the trace's speed, requests never overlap."""
SEARCH_STEPS = 6
MOST_DOUBLINGS = 24
LEAST_RPS = 1e-4
LEAST_REQUESTS = 20
ALONE_REQUESTS = 300
ENGINE_BLOCK_TOKENS = 16
MESSAGES_OF_A_HANDOVER = 3
INSTANT_S = 1e-9
SHARES = ("p50", "p90", "p99")
OWN_TABLES = ("cluster", "conductor", "engine", "pool")
"""The tables of a moonpool server's configuration that affect its decisions."""


class TriedLoad(Struct, frozen=True):
    """A load, as a share of the predicted capacity, and the requests that make it: the first rows
    of the trace, `speed` times as fast, so that `rps` of them come per second."""

    share: float
    rps: float
    speed: float
    rows: TraceRows


class LoadForecast(Struct, frozen=True):
    load: TriedLoad
    figures: dict[str, Any]


class SimulatedServer:
    """A measured server in the simulator."""

    def __init__(
        self,
        measured: MeasuredServer,
        described: dict[str, Any] | None,
        stated: Sequence[InstanceRecord],
        trace: TraceRows,
    ) -> None:
        """`described` is the configuration that a moonpool server shows, or None for another
        server. `stated` has the costs by which the server's instances decide. Raises ConfigError,
        TraceError."""
        self._trace = trace
        self._folder = tempfile.TemporaryDirectory()
        profile = Path(self._folder.name) / "profile.json"
        tables = _own_tables(measured, described) if described is not None else {}
        if not tables:
            tables = _foreign_tables(measured, trace)
        # Messages are part of the measured times, except for those between prefill and decode.
        separate = bool(tables["cluster"].get("decode"))
        control_s = measured.handover_s / MESSAGES_OF_A_HANDOVER if separate else 0.0
        cost = msgspec.structs.replace(measured.cost, control_latency_s=max(control_s, INSTANT_S))
        profile.write_bytes(
            msgspec.json.encode(msgspec.convert(msgspec.to_builtins(cost), Profile))
        )
        self._recorded = record_of(stated, cost, measured.chunk_ratios)
        tables["hardware"] = {"cost": str(profile)}
        self._tables = tables
        self._config = cluster_config(tables, {})

    def close(self) -> None:
        self._folder.cleanup()

    @property
    def tables(self) -> dict[str, Any]:
        """The simulated cluster as tables of a configuration."""
        return {name: table for name, table in self._tables.items() if name != "hardware"}

    def usual_slo(self) -> Slo:
        """Returns the SLOs that follow from latencies without load."""
        alone = self.run(self._first(ALONE_REQUESTS), ALONE_SPEED, Slo(ttft_s=1e4, tbt_s=1e4))
        ttft, tbt = SLO_FACTORS
        return Slo(ttft_s=ttft * alone["ttft_s"]["p90"], tbt_s=tbt * alone["tbt_s"]["p90"])

    def capacity_rps(self, run_s: float, slo: Slo) -> float:
        """Returns the most requests per second of a run of `run_s` of which the share ATTAINMENT
        meets the SLOs, or 0 if not even single requests do. The requests are the ones that are
        replayed at the load 1, because other parts of a trace have other lengths and bursts."""

        def holds(rps: float) -> bool:
            load = self._load(1.0, rps, run_s)
            return bool(self.run(load.rows, load.speed, slo)["effective_share"] >= ATTAINMENT)

        low, high = 0.0, 1.0
        for _ in range(MOST_DOUBLINGS):
            if not holds(high):
                break
            low, high = high, 2.0 * high
        while not low and high > LEAST_RPS:
            high /= 2.0
            low = high if holds(high) else 0.0
            high = 2.0 * high if low else high
        for _ in range(SEARCH_STEPS if low else 0):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if holds(middle) else (low, middle)
        return low

    def forecast(
        self, shares: Sequence[float], capacity_rps: float, run_s: float, slo: Slo
    ) -> list[LoadForecast]:
        """Returns the figures of each load, from the requests of `run_s` seconds."""
        found = []
        for share in shares:
            load = self._load(share, share * capacity_rps, run_s)
            found.append(LoadForecast(load, self.run(load.rows, load.speed, slo)))
        return found

    def run(self, rows: TraceRows, speed: float, slo: Slo) -> dict[str, Any]:
        """Simulates the rows; returns `forecast_figures`."""
        slos = {"slo": {"ttft_s": slo.ttft_s, "tbt_s": slo.tbt_s}}
        config: Config = cluster_config({**self._tables, **slos}, {})
        settings = RunSettings(speed=speed, capped_answers=True, recorded=self._recorded)
        return forecast_figures(run_simulation(rows, config, settings, keep_requests=False).summary)

    def _first(self, count: int) -> TraceRows:
        return TraceRows(self._trace.rows[:count], self._trace.block_tokens, self._trace.name)

    def _load(self, share: float, rps: float, run_s: float) -> TriedLoad:
        """Returns the first requests of the trace at the rate that a run of `run_s` needs. The run
        is longer if it would have fewer than LEAST_REQUESTS, and shorter if the trace ends."""
        rows = self._trace.rows
        count = min(max(round(rps * run_s), LEAST_REQUESTS), len(rows))
        if count < len(rows):
            took_s = rows[count].arrived_s - rows[0].arrived_s
        else:
            took_s = (rows[-1].arrived_s - rows[0].arrived_s) * count / max(count - 1, 1)
        return TriedLoad(share, rps, (took_s * rps / count) or 1.0, self._first(count))


def forecast_figures(figures: dict[str, Any]) -> dict[str, Any]:
    """Selects the figures that a forecast has from the figures of a simulation or a replay."""
    return {
        "requests": figures["requests"],
        "completed": figures["completed"],
        "rejected": figures["rejected"],
        "effective": figures["effective"],
        "effective_share": figures["effective_share"],
        "hit_ratio": figures["cache"]["hit_ratio"],
        "ttft_s": {share: figures["ttft_s"][share] for share in SHARES},
        "tbt_s": {share: figures["tbt_s"][share] for share in SHARES},
    }


def _own_tables(measured: MeasuredServer, described: dict[str, Any]) -> dict[str, Any]:
    """Returns the tables of a moonpool server with its own instances, or no tables. If the
    configuration does not state the size of the pool, the measured size counts."""
    tables = {name: dict(described[name]) for name in OWN_TABLES if name in described}
    cluster = tables.get("cluster", {})
    num_instances = sum(cluster.get(role) or 0 for role in ("prefill", "decode", "mixed"))
    if not num_instances:
        return {}
    pool = tables.get("pool", {})
    if not pool.get("dram_tokens_per_instance") and measured.full and measured.cache_tokens:
        pool["dram_tokens_per_instance"] = measured.cache_tokens // num_instances
    return tables


def _foreign_tables(measured: MeasuredServer, trace: TraceRows) -> dict[str, Any]:
    """Returns one mixed instance that admits everything, with the measured sizes. If the
    measurement did not fill the cache, the simulated cache has room for the whole trace."""
    block_tokens = ENGINE_BLOCK_TOKENS
    if trace.block_tokens and trace.block_tokens % block_tokens:
        # one block size must be a multiple of the other
        block_tokens = lcm(block_tokens, trace.block_tokens)
    cache_tokens = measured.cache_tokens
    if not (measured.full and cache_tokens):
        cache_tokens = max(sum(r.input_tokens + r.output_tokens for r in trace.rows), cache_tokens)
    return {
        "cluster": {"prefill": 0, "decode": 0, "mixed": 1},
        "conductor": {"admission": "none", "learning": False},
        "engine": {
            "batching": "fixed-chunks",
            "chunk_tokens": measured.chunk_tokens,
            "max_sequences": measured.max_sequences,
        },
        "pool": {
            "block_tokens": block_tokens,
            "dram_tokens_per_instance": max(cache_tokens, 64 * block_tokens),
            "prefix_caching": measured.has_cache,
            "eviction": "lru",
        },
    }
