"""One replay from plan to figures: queries the server, plays the trace, and sums up.

The figures have the names of `simulate --json`. What only the server knows is read from its
counters, if it is a moonpool server.
"""

from __future__ import annotations

import asyncio
import resource
import time
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import msgspec

from moonpool.config.slo import SloClass, SloConfig
from moonpool.distributions import rounded
from moonpool.http_client.client import HttpClient
from moonpool.protocol.frames import HEARTBEAT_S
from moonpool.sim.outcome import request_figures
from moonpool.trace.reader import open_trace
from moonpool.trace.row import TraceInfo, TraceRow
from moonpool.trace.transform import scale_trace
from moonpool.types import Slo
from moonpool_lab.replay.player import Player, PlayOptions
from moonpool_lab.replay.prompts import PromptMaker
from moonpool_lab.replay.server import ASSUMED_VOCAB, ServerFacts, query_server, read_counters

PAPER_SLO = Slo(ttft_s=30.0, tbt_s=0.1)


class ReplayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to replay, and how. None leaves the SLO to the server. `rows` with `block_tokens` may
    replace the trace's file."""

    url: str
    trace_file: str = ""
    trace_format: str = "auto"
    rows: tuple[TraceRow, ...] = ()
    block_tokens: int = 0
    speed: float = 1.0
    requests: int | None = None
    scale: Fraction = Fraction(1)
    model: str | None = None
    vocab_size: int | None = None
    as_text: bool = False
    slo_ttft_s: float | None = None
    slo_tbt_s: float | None = None
    slo_classes: tuple[SloClass, ...] = ()
    retries: int = 0
    concurrency: int = 1024
    timeout_s: float = 600.0
    api_key: str = ""
    ca_file: str = ""
    seed: int = 0


def ignore(*_: Any) -> None:
    """The default callback: does nothing."""


async def run_replay(
    plan: ReplayPlan,
    on_ready: Callable[[Callable[[], None]], None] = ignore,
    show: Callable[[int, int], None] = ignore,
    opened: Callable[[TraceInfo], None] = ignore,
) -> dict[str, Any]:
    """Runs a replay and returns its figures.

    `on_ready` is called with a function that ends the run early. `show` is called with the numbers
    of ended requests and of all requests, and `opened` with what is known about the trace file.
    Raises ServerUnfitError, UnservableError, TraceError, ValueError.
    """
    client = HttpClient(plan.url, plan.api_key, ca_file=plan.ca_file)
    rows, total, block_tokens = _rows(plan, opened)
    facts = await query_server(client, plan.model)
    slo = _slo(plan, facts)
    vocab_size = plan.vocab_size or min(facts.vocab_size or ASSUMED_VOCAB, 1 << 31)
    prompts = PromptMaker(block_tokens, vocab_size, plan.seed, plan.as_text)
    options = PlayOptions(
        model=facts.model,
        slo=slo,
        slo_classes=SloConfig(classes=plan.slo_classes),
        send_slo=plan.slo_ttft_s is not None or plan.slo_tbt_s is not None,
        concurrency=plan.concurrency,
        retries=plan.retries,
        timeout_s=plan.timeout_s,
    )
    player = Player(client, prompts, options)
    on_ready(player.stop)
    before = await read_counters(client)
    began_s, began_cpu_s = time.perf_counter(), cpu_s()
    try:
        await player.play(rows, lambda: show(player.collector.num_requests, total))
        spent = time.perf_counter() - began_s, cpu_s() - began_cpu_s
        if facts.config is not None:
            # so that the last counters of the instances arrive
            await asyncio.sleep(1.1 * HEARTBEAT_S)
        after = await read_counters(client)
    finally:
        client.close()
    figures = summarise(player, facts, before, after, spent, plan.seed)
    return figures | {"slo": msgspec.to_builtins(slo), "url": plan.url}


def _rows(
    plan: ReplayPlan, opened: Callable[[TraceInfo], None]
) -> tuple[Iterable[TraceRow], int, int]:
    """Returns the rows, their number, and the tokens of their blocks."""
    if not plan.trace_file:
        return plan.rows, len(plan.rows), plan.block_tokens
    trace = open_trace(
        plan.trace_file, format=plan.trace_format, limit=plan.requests, speed=plan.speed
    )
    opened(trace.info)
    total = min(trace.info.num_rows, plan.requests or trace.info.num_rows)
    scaled = scale_trace(trace, plan.scale)
    return scaled, total, scaled.info.block_tokens


def _slo(plan: ReplayPlan, facts: ServerFacts) -> Slo:
    usual = PAPER_SLO
    if facts.config is not None:
        usual = msgspec.convert(facts.config["slo"], Slo)
    return Slo(
        ttft_s=usual.ttft_s if plan.slo_ttft_s is None else plan.slo_ttft_s,
        tbt_s=usual.tbt_s if plan.slo_tbt_s is None else plan.slo_tbt_s,
    )


Counters = dict[str, float]


def summarise(
    player: Player,
    facts: ServerFacts,
    before: Counters,
    after: Counters,
    spent: tuple[float, float],
    seed: int,
) -> dict[str, Any]:
    """Returns the figures. `spent`: seconds by the clock, and seconds of this process's CPU
    time."""
    wall_s, cpu_s = spent
    replayed_s = max(player.last_end_s, 1e-9)
    found = player.collector
    figures = request_figures(found, player.last_arrival_s or replayed_s)
    if len(player.programs):
        figures["programs"] = player.programs.summary()
    figures |= {
        "unfinished": player.num_unfinished,
        "interrupted": player.interrupted,
        "errors": dict(player.errors.most_common(8)),
        "resent": player.num_resent,
        "simulated_s": rounded(replayed_s, 9),
        "wall_s": round(wall_s, 3),
        "seed": seed,
        "model": facts.model,
        "config": facts.config or {},
        "client": {
            "late_s": player.late_s.summary() | {"max": rounded(player.late_s.largest)},
            "delayed": player.num_delayed,
            "peak_in_flight": player.peak_in_flight,
            "cpu_s": rounded(cpu_s),
            "cpu_us_per_token": rounded(1e6 * cpu_s / max(found.output_tokens, 1)),
        },
    }
    if facts.config is not None:
        _add_server(figures, _since(before, after), after, facts, replayed_s)
    return figures


def cpu_s() -> float:
    """Returns the CPU seconds of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _since(before: Counters, after: Counters) -> Counters:
    return {name: value - before.get(name, 0.0) for name, value in after.items()}


def _named(counters: Counters, name: str) -> dict[str, float]:
    """Returns the values of one metric by label."""
    start = name + "{"
    return {key[len(start) : -1]: v for key, v in counters.items() if key.startswith(start)}


def _add_server(
    figures: dict[str, Any], new: Counters, after: Counters, facts: ServerFacts, replayed_s: float
) -> None:
    """Adds figures that only the server counts."""
    figures["wasted_prefill_s"] = rounded(new.get("moonpool:wasted_prefill_seconds_total", 0.0))
    figures["wasted_prefills"] = int(new.get("moonpool:wasted_prefills_total", 0))
    figures["prefill_s"] = rounded(new.get("moonpool:prefill_seconds_total", 0.0))
    figures["cache"]["fetched_tokens"] = int(new.get("moonpool:fetched_tokens_total", 0))
    all_moved = _named(new, "moonpool:transfer_bytes_total")
    moved = {transport: num_bytes for transport, num_bytes in all_moved.items() if num_bytes}
    figures["transfer"] = {
        "bytes": int(sum(moved.values())),
        "seconds": rounded(new.get("moonpool:transfer_seconds_total", 0.0)),
        "by_transport": moved,
    }
    instances = _named(after, "moonpool:instances")
    figures["utilisation"] = {
        role: rounded(seconds / (instances[role] * replayed_s))
        for role, seconds in sorted(_named(new, "moonpool:step_seconds_total").items())
        if instances.get(role)
    }
    rejected = _named(new, "moonpool:requests_rejected_total")
    figures["server"] = {
        "rejected_by_reason": {name: int(n) for name, n in sorted(rejected.items()) if n},
        "failed_by_reason": {
            name: int(n)
            for name, n in sorted(_named(new, "moonpool:requests_failed_total").items())
            if n
        },
        "ttft_s": {"mean": _mean(new, "vllm:time_to_first_token_seconds")},
        "tbt_s": {"mean": _mean(new, "vllm:inter_token_latency_seconds")},
    }
    compared = new.get("moonpool:predictions_total{ttft_s}", 0.0)
    if compared:
        parts = ("too_much", "too_little")
        errors_s = sum(new[f"moonpool:predictions_{part}_total{{ttft_s}}"] for part in parts)
        figures["predicted_ttft_error_s"]["mean_absolute"] = rounded(errors_s / compared)


def _mean(new: Counters, name: str) -> float:
    return rounded(new.get(f"{name}_sum", 0.0) / max(new.get(f"{name}_count", 0.0), 1.0))
