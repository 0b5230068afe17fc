"""One replay from plan to figures: asks the server what it is, plays, and sums up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from fractions import Fraction
from typing import Any

import msgspec

from moonpool.replay.connection import HttpClient
from moonpool.replay.outcome import cpu_s, summarise
from moonpool.replay.player import Player, PlayOptions
from moonpool.replay.prompts import PromptMaker
from moonpool.replay.server import ASSUMED_VOCAB, ServerFacts, ask_server, read_counters
from moonpool.runtime.protocol import HEARTBEAT_S
from moonpool.trace.reader import open_trace
from moonpool.trace.row import TraceRow
from moonpool.trace.scale import scale_trace
from moonpool.types import Slo

PAPER_SLO = Slo(ttft_s=30.0, tbt_s=0.1)


class ReplayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """None leaves a choice to the server. `rows` with their `block_tokens` may stand in for the
    trace's file."""

    url: str
    trace_file: str = ""
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
    retries: int = 0
    concurrency: int = 1024
    timeout_s: float = 600.0
    api_key: str = ""
    seed: int = 0


def no_one(*_: Any) -> None:
    """Hears, and does nothing."""


async def run_replay(
    plan: ReplayPlan,
    on_ready: Callable[[Callable[[], None]], None] = no_one,
    show: Callable[[int, int], None] = no_one,
) -> dict[str, Any]:
    """`on_ready` gets what ends the run early; `show` hears how many of how many have ended.
    Raises ServerUnfitError, HopelessError, TraceError, ValueError."""
    client = HttpClient(plan.url, plan.api_key)
    rows, total, block_tokens = _rows(plan)
    facts = await ask_server(client, plan.model)
    slo = _slo(plan, facts)
    vocab_size = plan.vocab_size or min(facts.vocab_size or ASSUMED_VOCAB, 1 << 31)
    prompts = PromptMaker(block_tokens, vocab_size, plan.seed, plan.as_text)
    options = PlayOptions(
        model=facts.model,
        slo=slo,
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
            await asyncio.sleep(1.1 * HEARTBEAT_S)  # the instances' last word
        after = await read_counters(client)
    finally:
        client.close()
    figures = summarise(player, facts, before, after, spent, plan.seed)
    return figures | {"slo": msgspec.to_builtins(slo), "url": plan.url}


def _rows(plan: ReplayPlan) -> tuple[Iterable[TraceRow], int, int]:
    """Rows, how many, and their blocks' size."""
    if not plan.trace_file:
        return plan.rows, len(plan.rows), plan.block_tokens
    trace = open_trace(plan.trace_file, limit=plan.requests, speed=plan.speed)
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
