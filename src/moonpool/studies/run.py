"""Runs one simulation: `moonpool simulate` and `moonpool.simulate` call the same function."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

from msgspec import structs

from moonpool.config.tables import Config
from moonpool.gc_tuning import rare_collections
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.outcome import summarise
from moonpool.sim.settings import SimulationSettings
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import make_arrivals
from moonpool.studies.hardware_files import instance_usd, read_beliefs, read_catalogue_and_profile
from moonpool.studies.simulation_result import RequestLog, SimulationResult
from moonpool.studies.trace_rows import TraceRows, named_trace, open_scaled
from moonpool.trace.row import TraceInfo, TraceRow

NOT_TOLD = frozenset(
    {"requests", "seed", "recorded", "sample_s", "node_series", "most_programs", "objects"}
)
"""The settings that the part `run` of the figures omits: another part has them, or no command
offers them."""
Watch = Callable[[Iterator[TraceRow], TraceInfo], Iterable[TraceRow]]
"""A callback that receives the rows before the simulation, to show progress or to count them."""


class RunSettings(SimulationSettings, frozen=True):
    """The settings of a run besides its trace and configuration; see `moonpool simulate`. The
    fields below say how to read the files and the trace. The simulation takes inherited fields."""

    speed: float = 1.0
    requests: int | None = None
    scale_tokens: Fraction = Fraction(1)
    trace_format: str = "auto"
    prefill_belief: float = 1.0
    decode_belief: float = 1.0
    beliefs_file: str | None = None
    catalogue_file: str | None = None

    def as_figures(self) -> dict[str, Any]:
        """Returns the part `run` of the figures: the options of `moonpool simulate`, without the
        number of requests, which the figures have elsewhere."""
        named = {
            name: getattr(self, name) for name in self.__struct_fields__ if name not in NOT_TOLD
        }
        for name in ("slow", "drain", "restart", "tenant_share", "tenant_cache"):
            named[name] = [f"{key}={value:g}" for key, value in named[name].items()]
        return named | {"scale_tokens": str(self.scale_tokens)}


def run_simulation(
    trace: str | Path | TraceRows,
    config: Config,
    settings: RunSettings,
    watch: Watch = lambda rows, info: rows,
    keep_requests: bool = True,
) -> SimulationResult:
    """Simulates the trace on the cluster.

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
    recorded = settings.recorded or read_beliefs(settings.beliefs_file)
    simulation = Simulation(config, hardware, structs.replace(settings, recorded=recorded))
    sizes = (rows.info.block_tokens, config.pool.block_tokens, hardware.largest_request_tokens)
    with rare_collections():
        arrivals = make_arrivals(watch(iter(rows), rows.info), *sizes)
        simulation.run(arrivals, log.add if keep_requests else None)
    figures = summarise(simulation, time.perf_counter() - began_s)
    figures["usd"] = instance_usd(config, catalogue, profile, figures["instance_hours"])
    figures["trace_has_hashes"] = rows.info.block_tokens > 0
    figures["run"] = named_trace(trace) | settings.as_figures()
    return SimulationResult(simulation, figures, log)
