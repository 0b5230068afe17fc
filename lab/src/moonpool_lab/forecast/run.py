"""Forecasts how a server answers a trace, stores the forecast, and then replays the trace.

The order matters: the forecast of all loads is in the table, on the disk, before the first load is
replayed. The outcomes follow the forecast in the table, and name its hash.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from moonpool.http_client.client import ConnectionFailedError, HttpClient
from moonpool.studies.trace_rows import TraceRows
from moonpool.trace.row import TraceError
from moonpool.types import Slo, Struct
from moonpool_lab.forecast.errors import forecast_errors
from moonpool_lab.forecast.forecast_table import Entry, add_entry
from moonpool_lab.forecast.front_door import FrontDoor
from moonpool_lab.forecast.measured_server import (
    MeasuredServer,
    ServerRoles,
    TraceLengths,
    measure_server,
)
from moonpool_lab.forecast.simulated_loads import (
    LoadForecast,
    SimulatedServer,
    forecast_figures,
)
from moonpool_lab.forecast.stated_costs import read_stated_costs
from moonpool_lab.replay.run import ReplayPlan, run_replay
from moonpool_lab.replay.server import ASSUMED_VOCAB, ServerFacts, ServerUnfitError, query_server

LOADS = (0.5, 0.8, 1.0, 1.5)
QUIET_S = 2.0
"""The pause between two runs, in which the answers of the first run end."""


class ForecastError(ValueError):
    """Says that there is nothing to forecast, why, and what to do."""


class ForecastPlan(Struct, frozen=True, kw_only=True):
    """The settings of a forecast. If the SLOs are None, the server states them, or they follow from
    the server's latencies without load."""

    url: str
    trace: TraceRows
    table: Path
    title: str = ""
    loads: Sequence[float] = LOADS
    measure_s: float = 60.0
    run_s: float = 60.0
    model: str | None = None
    vocab_size: int | None = None
    as_text: bool = False
    slo_ttft_s: float | None = None
    slo_tbt_s: float | None = None
    timeout_s: float = 600.0
    api_key: str = ""
    ca_file: str = ""
    seed: int = 0
    origin: Mapping[str, str] = msgspec.field(default_factory=dict)
    trace_named: Mapping[str, str] = msgspec.field(default_factory=dict)


Tell = Callable[[str], None]


async def run_forecast(plan: ForecastPlan, tell: Tell) -> dict[str, Any]:
    """Measures the server, stores a forecast, replays the loads, and stores the outcomes. `tell`
    gets lines for a person to read.

    Returns the entry of the forecast and the entries of the outcomes. Raises ForecastError,
    TableError, ServerUnfitError, UnservableError, ConnectionFailedError, ConfigError and
    TraceError.
    """
    client = HttpClient(plan.url, plan.api_key, ca_file=plan.ca_file)
    try:
        facts = await query_server(client, plan.model)
        longest_tokens = await FrontDoor.context_tokens(client, facts)
        facts = msgspec.structs.replace(facts, max_model_tokens=longest_tokens)
        trace, num_left_out = _fitting(plan.trace, longest_tokens)
        vocab_size = plan.vocab_size or facts.vocab_size or ASSUMED_VOCAB
        tell(f"measuring {facts.model} for {plan.measure_s:g} s")
        door = FrontDoor(client, facts, vocab_size, plan.as_text)
        roles = _roles(facts)
        measured = await measure_server(door, _lengths(trace), plan.measure_s, tell, roles)
        stated = await read_stated_costs(client) if facts.config is not None else ()
        if facts.config is not None and not stated:
            tell("the server does not tell by which costs it decides, for which it wants the")
            tell("operator's key (--api-key): the forecast assumes the measured ones")
    finally:
        client.close()
    server = SimulatedServer(measured, facts.config, stated, trace)
    try:
        slo = _slo(plan, facts, server)
        capacity_rps = server.capacity_rps(plan.run_s, slo)
        if not capacity_rps:
            raise ForecastError(
                f"the server would not meet TTFT {slo.ttft_s:g} s and TBT {slo.tbt_s:g} s for"
                " single requests: give longer ones with --slo-ttft and --slo-tbt"
            )
        loads = server.forecast(plan.loads, capacity_rps, plan.run_s, slo)
        entry = _forecast_entry(plan, facts, measured, slo, capacity_rps, loads)
        entry |= {"left_out": num_left_out, "simulated": server.tables}
        entry |= {"stated": msgspec.to_builtins(stated)}
    finally:
        server.close()
    forecast_hash = add_entry(plan.table, entry)
    tell(f"forecast {forecast_hash[:12]} is in {plan.table}; now it is tried")
    outcomes = []
    for number, forecast in enumerate(loads):
        await asyncio.sleep(QUIET_S)
        try:
            came = await _try(plan, facts, vocab_size, slo, forecast, forecast_hash, number)
        except (ServerUnfitError, ConnectionFailedError) as error:
            raise ForecastError(
                f"load {forecast.load.share:g} could not be tried: {error}. The forecast stays in"
                f" {plan.table}, with the outcomes of {number} loads"
            ) from error
        outcomes.append(came)
        add_entry(plan.table, outcomes[-1])
        tell(f"load {forecast.load.share:g}: {len(forecast.load.rows)} requests tried")
    return {"forecast": entry | {"hash": forecast_hash}, "outcomes": outcomes}


def _fitting(trace: TraceRows, longest_tokens: int | None) -> tuple[TraceRows, int]:
    """Returns the requests that the server can hold, and the number of all others."""
    if longest_tokens is None:
        return trace, 0
    rows = [row for row in trace.rows if row.input_tokens + row.output_tokens < longest_tokens]
    if not rows:
        raise TraceError(
            f"every request of {trace.name} is longer than the {longest_tokens} tokens of the"
            " server: give --scale-tokens, such as 1/16"
        )
    kept = TraceRows(rows, trace.block_tokens, trace.name)
    return kept, len(trace.rows) - len(rows)


def _lengths(trace: TraceRows) -> TraceLengths:
    return TraceLengths(
        tuple(sorted(row.input_tokens for row in trace.rows)),
        tuple(sorted(row.input_tokens + row.output_tokens for row in trace.rows)),
    )


def _roles(facts: ServerFacts) -> ServerRoles:
    """A server other than moonpool's is taken for one instance."""
    cluster = (facts.config or {}).get("cluster", {})
    prefill, decode, mixed = (int(cluster.get(r) or 0) for r in ("prefill", "decode", "mixed"))
    return ServerRoles(decoding=max(decode + mixed, 1), separate=bool(prefill))


def _slo(plan: ForecastPlan, facts: ServerFacts, server: SimulatedServer) -> Slo:
    stated = (facts.config or {}).get("slo", {})
    ttft_s = plan.slo_ttft_s or stated.get("ttft_s")
    tbt_s = plan.slo_tbt_s or stated.get("tbt_s")
    if ttft_s and tbt_s:
        return Slo(ttft_s=ttft_s, tbt_s=tbt_s)
    usual = server.usual_slo()
    return Slo(ttft_s=ttft_s or usual.ttft_s, tbt_s=tbt_s or usual.tbt_s)


def _forecast_entry(
    plan: ForecastPlan,
    facts: ServerFacts,
    measured: MeasuredServer,
    slo: Slo,
    capacity_rps: float,
    loads: Sequence[LoadForecast],
) -> Entry:
    return {
        "kind": "forecast",
        "written": _now(),
        "title": plan.title or f"{facts.model}, {plan.trace.name}",
        "model": facts.model,
        "server": "moonpool" if facts.config is not None else "another",
        "host": urlsplit(plan.url).hostname,
        "trace": dict(plan.trace_named),
        "measure_s": plan.measure_s,
        "run_s": plan.run_s,
        "seed": plan.seed,
        "slo": msgspec.to_builtins(slo),
        "capacity_rps": round(capacity_rps, 6),
        "measured": msgspec.to_builtins(measured),
        "loads": [
            {
                "load": one.load.share,
                "rps": one.load.rps,
                "speed": one.load.speed,
                "rows": len(one.load.rows),
                "figures": one.figures,
            }
            for one in loads
        ],
        "origin": dict(plan.origin),
    }


async def _try(
    plan: ForecastPlan,
    facts: ServerFacts,
    vocab_size: int,
    slo: Slo,
    forecast: LoadForecast,
    forecast_hash: str,
    number: int,
) -> Entry:
    """Replays one load. Each load has new prompts, so none of them is cached at the start."""
    load = forecast.load
    figures = await run_replay(
        ReplayPlan(
            url=plan.url,
            rows=tuple(row.faster(load.speed) for row in load.rows),
            block_tokens=load.rows.block_tokens,
            model=facts.model,
            vocab_size=vocab_size,
            as_text=plan.as_text,
            slo_ttft_s=slo.ttft_s,
            slo_tbt_s=slo.tbt_s,
            timeout_s=plan.timeout_s,
            api_key=plan.api_key,
            ca_file=plan.ca_file,
            seed=plan.seed + number,
        )
    )
    measured = forecast_figures(figures)
    return {
        "kind": "outcome",
        "forecast": forecast_hash,
        "written": _now(),
        "load": load.share,
        "figures": measured,
        "errors": forecast_errors(forecast.figures, measured),
        "client": {"late_s": figures["client"]["late_s"], "delayed": figures["client"]["delayed"]},
        "failed": figures["failed"],
    }


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
