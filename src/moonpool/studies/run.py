"""Runs one simulation: `moonpool simulate` and `moonpool.simulate` call the same function."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from types import MappingProxyType
from typing import Any

from moonpool.config.tables import Config
from moonpool.gc_tuning import rare_collections
from moonpool.plugins.policies import Objects
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.outcome import summarise
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import make_arrivals
from moonpool.studies.hardware_files import instance_usd, read_beliefs, read_catalogue_and_profile
from moonpool.studies.request_log import RequestLog
from moonpool.studies.simulation_result import SimulationResult
from moonpool.studies.trace_rows import TraceRows, named_trace, open_scaled
from moonpool.trace.row import TraceInfo, TraceRow
from moonpool.types import Struct

Watch = Callable[[Iterator[TraceRow], TraceInfo], Iterable[TraceRow]]
"""Gets the rows before the simulation does, for a bar or a count."""


class RunSettings(Struct, frozen=True):
    """What a run depends on besides its trace, configuration and seed; see `moonpool simulate`.

    `slow`, `drain` and `restart` are by name of an instance. `capped_answers`: clients cap each
    answer at the length it has. `boot_s`: seconds until an instance that autoscale starts can
    serve. `tenant_share`: a tenant's share of an overloaded cluster, relative to 1. `tenant_cache`:
    most of each instance's cache that a tenant may have.
    """

    speed: float = 1.0
    requests: int | None = None
    scale_tokens: Fraction = Fraction(1)
    trace_format: str = "auto"
    noise: float = 0.0
    prefill_belief: float = 1.0
    decode_belief: float = 1.0
    slow: Mapping[str, float] = {}
    drain: Mapping[str, float] = {}
    restart: Mapping[str, float] = {}
    tenant_share: Mapping[str, float] = {}
    tenant_cache: Mapping[str, float] = {}
    beliefs_file: str | None = None
    layer_wise: bool = True
    capped_answers: bool = False
    boot_s: float = 120.0
    catalogue_file: str | None = None

    def as_figures(self) -> dict[str, Any]:
        """The part `run` of the figures: all but the number of requests, which stands beside."""
        named = {name: getattr(self, name) for name in self.__struct_fields__}
        del named["requests"]
        for name in ("slow", "drain", "restart", "tenant_share", "tenant_cache"):
            named[name] = [f"{key}={value:g}" for key, value in named[name].items()]
        return named | {"scale_tokens": str(self.scale_tokens)}


def run_simulation(
    trace: str | Path | TraceRows,
    config: Config,
    settings: RunSettings,
    objects: Objects = MappingProxyType({}),
    watch: Watch = lambda rows, info: rows,
    keep_requests: bool = True,
) -> SimulationResult:
    """Simulates the trace on the cluster. `objects` are policies themselves,
    by config key.

    Without `keep_requests`, memory does not grow with the trace and the result's table of requests
    is empty. Raises TraceError and ConfigError.
    """
    began_s = time.perf_counter()
    rows = open_scaled(
        trace, settings.requests, settings.speed, settings.scale_tokens, settings.trace_format
    )
    catalogue, profile = read_catalogue_and_profile(config, settings.catalogue_file)
    hardware = build_hardware(
        config, profile, catalogue, settings.prefill_belief, settings.decode_belief
    )
    log = RequestLog()
    simulation = Simulation(
        config,
        hardware,
        config.conductor.seed,
        settings.noise,
        settings.layer_wise,
        slow=settings.slow,
        drains=settings.drain,
        restarts=settings.restart,
        tenant_shares=settings.tenant_share,
        tenant_caches=settings.tenant_cache,
        recorded=read_beliefs(settings.beliefs_file),
        capped=settings.capped_answers,
        boot_s=settings.boot_s,
        objects=objects,
        on_end=log.add if keep_requests else None,
    )
    sizes = (rows.info.block_tokens, config.pool.block_tokens, hardware.largest_request_tokens)
    with rare_collections():
        simulation.run(make_arrivals(watch(iter(rows), rows.info), *sizes))
    figures = summarise(simulation, time.perf_counter() - began_s)
    figures["usd"] = instance_usd(config, catalogue, profile, figures["instance_hours"])
    figures["trace_has_hashes"] = rows.info.block_tokens > 0
    figures["run"] = named_trace(trace) | settings.as_figures()
    return SimulationResult(simulation, figures, log)
