"""Predicts by simulation how a measured server answers several loads, before they are tried.

The simulator gets the cluster that a moonpool server states. For another server, it gets one mixed
instance that admits everything. There is no second model of a server for forecasts.
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
from moonpool.studies.cluster import cluster_config
from moonpool.studies.run import RunSettings, run_simulation
from moonpool.studies.trace_rows import TraceRows
from moonpool.trace.row import TraceRow
from moonpool.types import Slo, Struct
from moonpool_lab.forecast.measured_server import MeasuredServer

ATTAINMENT = 0.9
"""The capacity is the highest rate at which this share of the requests meets both SLOs."""
SLO_FACTORS = (10.0, 5.0)
"""The unstated SLOs of TTFT and TBT as multiples of their P90 without load, as in Mooncake."""
ALONE_SPEED = 1e-4
"""At this multiple of the trace's speed, requests never overlap."""
SEARCH_STEPS = 6
MOST_DOUBLINGS = 24
LEAST_REQUESTS = 20
CAPACITY_REQUESTS = 300
ENGINE_BLOCK_TOKENS = 16
MESSAGES_OF_A_HANDOVER = 3
INSTANT_S = 1e-9
SHARES = ("p50", "p90", "p99")
OWN_TABLES = ("cluster", "conductor", "engine", "pool")
"""The tables of a moonpool server's configuration that affect its decisions."""


class TriedLoad(Struct, frozen=True):
    """A load, as a share of the predicted capacity, and the requests that make it."""

    share: float
    speed: float
    rows: TraceRows


class LoadForecast(Struct, frozen=True):
    load: TriedLoad
    figures: dict[str, Any]


class SimulatedServer:
    """A measured server in the simulator."""

    def __init__(
        self, measured: MeasuredServer, described: dict[str, Any] | None, trace: TraceRows
    ) -> None:
        """`described` is the configuration that a moonpool server shows, or None for another
        server. Raises ConfigError, TraceError."""
        self._trace = trace
        self._folder = tempfile.TemporaryDirectory()
        profile = Path(self._folder.name) / "profile.json"
        tables = _own_tables(described) if described is not None else {}
        if not tables:
            tables = _foreign_tables(measured, trace)
        # Messages are part of the measured times, except for those between prefill and decode.
        separate = bool(tables["cluster"].get("decode"))
        control_s = measured.handover_s / MESSAGES_OF_A_HANDOVER if separate else 0.0
        cost = msgspec.structs.replace(measured.cost, control_latency_s=max(control_s, INSTANT_S))
        profile.write_bytes(
            msgspec.json.encode(msgspec.convert(msgspec.to_builtins(cost), Profile))
        )
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
        alone = self.run(self._first(CAPACITY_REQUESTS), ALONE_SPEED, Slo(ttft_s=1e4, tbt_s=1e4))
        ttft, tbt = SLO_FACTORS
        return Slo(ttft_s=ttft * alone["ttft_s"]["p90"], tbt_s=tbt * alone["tbt_s"]["p90"])

    def capacity_speed(self, slo: Slo) -> float:
        """Returns the highest speed, as a multiple of the trace's, at which the share ATTAINMENT of
        requests meets the SLOs, or 0 if not even single requests do."""
        rows = self._first(CAPACITY_REQUESTS)

        def holds(speed: float) -> bool:
            return bool(self.run(rows, speed, slo)["effective_share"] >= ATTAINMENT)

        low, high = 0.0, 1.0
        for _ in range(MOST_DOUBLINGS):
            if not holds(high):
                break
            low, high = high, 2.0 * high
        while not low and high > ALONE_SPEED:
            high /= 2.0
            low = high if holds(high) else 0.0
            high = 2.0 * high if low else high
        for _ in range(SEARCH_STEPS if low else 0):
            middle = (low * high) ** 0.5
            low, high = (middle, high) if holds(middle) else (low, middle)
        return low

    def forecast(
        self, shares: Sequence[float], capacity: float, run_s: float, slo: Slo
    ) -> list[LoadForecast]:
        """Returns the figures of each load, from the requests of `run_s` seconds."""
        found = []
        for share in shares:
            speed = share * capacity
            load = TriedLoad(share, speed, self._first_seconds(run_s * speed))
            found.append(LoadForecast(load, self.run(load.rows, speed, slo)))
        return found

    def run(self, rows: TraceRows, speed: float, slo: Slo) -> dict[str, Any]:
        """Simulates the rows; returns `forecast_figures`."""
        slos = {"slo": {"ttft_s": slo.ttft_s, "tbt_s": slo.tbt_s}}
        config: Config = cluster_config({**self._tables, **slos}, {})
        settings = RunSettings(speed=speed, capped_answers=True)
        return forecast_figures(run_simulation(rows, config, settings, keep_requests=False).summary)

    def _first(self, count: int) -> TraceRows:
        return TraceRows(self._trace.rows[:count], self._trace.block_tokens, self._trace.name)

    def _first_seconds(self, seconds: float) -> TraceRows:
        rows: list[TraceRow] = [row for row in self._trace.rows if row.arrived_s <= seconds]
        return self._first(max(len(rows), LEAST_REQUESTS))


def forecast_figures(figures: dict[str, Any]) -> dict[str, Any]:
    """Returns the forecast figures, from the figures of a simulation or a replay. If no request hit
    a cache of unknown state, `hit_ratio` is the counted ratio."""
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


def _own_tables(described: dict[str, Any]) -> dict[str, Any]:
    """Returns the tables of a moonpool server with its own instances, or no tables."""
    tables = {name: dict(described[name]) for name in OWN_TABLES if name in described}
    cluster = tables.get("cluster", {})
    if not any(cluster.get(role) for role in ("prefill", "decode", "mixed")):
        return {}
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
