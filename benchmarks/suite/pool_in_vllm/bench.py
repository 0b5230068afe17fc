"""Two vLLMs without a pool, and with each of several pools, under the same load.

The memory of each vLLM holds a third of the prefixes, and a turn never goes to the vLLM that had
the one before it. Every answer is compared with the answer of a vLLM without a cache and without
other requests. The row without a pool tells the differences that batches make.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec

from benchmarks.suite.live.vllm_server import CPU_BLOCK_TOKENS
from benchmarks.suite.pool_in_vllm.fleet import Fleet, VllmShape
from benchmarks.suite.pool_in_vllm.play import (
    CacheCounts,
    Played,
    ask_alone,
    cache_counts,
    play,
    tokenize,
)
from benchmarks.suite.pool_in_vllm.pools import POOLS, WORDS, Pool, PoolName, PoolPlace
from benchmarks.suite.pool_in_vllm.versions import versions_of
from benchmarks.suite.pool_in_vllm.workload import (
    SHAPES,
    PoolCall,
    PoolWorkload,
    Prefixes,
    prefixes_of,
)
from moonpool.distributions import percentiles
from moonpool.types import Struct
from moonpool_lab.demo.local_server import ServerError
from moonpool_lab.trial.reference import Reference
from moonpool_lab.trial.tally import Phase, Tally, counts_of, fisher_p

SHARE_IN_MEMORY = 1 / 3
SPARE_TOKENS = 64
TOKENS_PER_WORD = 4
"""The most tokens that a workload's word takes in any vocabulary with all bytes."""
SETTLE_S = 20.0
"""Seconds between the load and a kill, so that delayed writes reach the disk."""
Say = Callable[[str], None]
Keep = Callable[[dict[str, Any]], None]


class PoolBenchPlan(Struct, frozen=True):
    """The pools that are compared, and the load."""

    model: str
    pythons: Mapping[PoolName, str]
    workloads: tuple[str, ...] = tuple(SHAPES)
    rounds: int = 3
    sessions: int = 0  # 0 means the workload's value
    concurrency: int = 6
    chunk_tokens: int = 512
    dram_mib: int = 1024
    tie_nats: float = 0.5
    timeout_s: float = 300.0
    seed: int = 0


class JudgedWorkload(msgspec.Struct):
    """A workload with the answers that are right."""

    workload: PoolWorkload
    prefixes: Prefixes
    references: dict[str, Reference]
    shape: VllmShape


class Row(msgspec.Struct):
    """The results of all rounds of one pool under one workload."""

    rounds: list[dict[str, Any]] = []
    load: Phase = msgspec.field(default_factory=Phase)
    after_one: Phase = msgspec.field(default_factory=Phase)
    after_all: Phase = msgspec.field(default_factory=Phase)
    examples: list[dict[str, Any]] = []
    absent: str = ""


def bench_pools(plan: PoolBenchPlan, say: Say, keep: Keep) -> dict[str, Any]:
    """Rows by workload and pool. A pool that cannot run is left out, and the reason is printed.
    `keep` receives the results so far after each round of each pool, because a complete run takes
    hours.

    Raises ServerError if no vLLM starts without a pool, httpx.HTTPError.
    """
    asked = msgspec.to_builtins(plan) | {"model": Path(plan.model).name}
    del asked["pythons"]
    workloads: dict[str, Any] = {}
    found = {"workloads": workloads, "plan": asked}
    for name in plan.workloads:
        prepared = _prepare(plan, name, say)
        found["versions"] = versions_of(plan.pythons)
        rows: dict[PoolName, Row] = {pool: Row() for pool in plan.pythons}
        for number in range(plan.rounds):
            for pool, row in rows.items():
                if not row.absent:
                    _play_round(plan, prepared, pool, row, number, say)
                    workloads[name] = _workload_figures(prepared, rows)
                    keep(found)
    return found


def _workload_figures(prepared: JudgedWorkload, rows: Mapping[PoolName, Row]) -> dict[str, Any]:
    return {
        "prefixes": msgspec.to_builtins(prepared.prefixes),
        "kv_tokens": prepared.shape.kv_tokens,
        "sessions": prepared.workload.shape.sessions,
        "turns": prepared.workload.shape.turns,
        "rows": _figures(rows),
    }


def _prepare(plan: PoolBenchPlan, name: str, say: Say) -> JudgedWorkload:
    """Asks two vLLMs that cache nothing, each with one request at a time."""
    shape = SHAPES[name]
    if plan.sessions:
        shape = msgspec.structs.replace(shape, sessions=plan.sessions)
    workload = PoolWorkload(shape, plan.seed)
    context = TOKENS_PER_WORD * max(len(call.question.text.split()) for call in workload.calls)
    alone = VllmShape(plan.model, 2 * context, context, plan.chunk_tokens, caches=False)
    python = plan.pythons["none"]
    with (
        tempfile.TemporaryDirectory() as folder,
        Fleet(python, Pool(_place(plan, python, Path(folder))), alone) as fleet,
    ):
        texts = [call.question.text for call in workload.calls]
        prompts = [tokenize(fleet.urls[0], plan.model, text) for text in texts]
        prefixes = prefixes_of(prompts, CPU_BLOCK_TOKENS)
        say(
            f"{name}: {len(texts)} calls of {prefixes.prompt_tokens:,} tokens,"
            f" {prefixes.distinct_tokens:,} distinct; the right answers"
        )
        played = asyncio.run(ask_alone(fleet.urls, plan.model, workload.calls, plan.timeout_s))
    failed = [one.answer.detail for one in played if one.answer.outcome != "answered"]
    if failed:
        raise ServerError(f"a vLLM alone did not answer: {failed[0]}")
    references = {one.call.question.name: Reference(one.answer, plan.tie_nats) for one in played}
    context = prefixes.longest_tokens + shape.answer_tokens + SPARE_TOKENS
    kv_tokens = max(round(prefixes.distinct_tokens * SHARE_IN_MEMORY), context + SPARE_TOKENS)
    tight = VllmShape(plan.model, kv_tokens, context, plan.chunk_tokens)
    return JudgedWorkload(workload, prefixes, references, tight)


def _place(plan: PoolBenchPlan, python: str, folder: Path) -> PoolPlace:
    return PoolPlace(python, folder, plan.dram_mib << 20, CPU_BLOCK_TOKENS)


def _play_round(
    plan: PoolBenchPlan, prepared: JudgedWorkload, name: PoolName, row: Row, number: int, say: Say
) -> None:
    """Runs the load, and in the first round also measures what is left after the restarts."""
    workload, python = prepared.workload, plan.pythons[name]
    tally = Tally(prepared.references)
    tally.load = row.load
    title = f"{workload.shape.name}, {WORDS[name]}, round {number + 1}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            pool = POOLS[name](_place(plan, python, Path(folder)))
            with Fleet(python, pool, prepared.shape) as fleet:
                figures = _load(plan, prepared, fleet, tally)
                row.rounds.append(figures)
                say(f"{title}: {_words(figures, row.load)}")
                if not number and pool.connector() is not None:
                    time.sleep(SETTLE_S)
                    fleet.restart_one()
                    _ask_again(plan, prepared, fleet.urls[:1], tally, row.after_one)
                    say(f"{title}, after kill -9 of one: {_phase_words(row.after_one)}")
                    fleet.restart_all()
                    _ask_again(plan, prepared, fleet.urls, tally, row.after_all)
                    say(f"{title}, after kill -9 of all: {_phase_words(row.after_all)}")
        except (ServerError, httpx.HTTPError, OSError) as error:
            row.absent = " ".join(str(error).split())[:400]
            say(f"{title}: left out: {row.absent}")
    row.examples += tally.examples


def _load(
    plan: PoolBenchPlan, prepared: JudgedWorkload, fleet: Fleet, tally: Tally
) -> dict[str, Any]:
    before = cache_counts(fleet.urls)
    played, seconds = asyncio.run(
        play(fleet.urls, plan.model, prepared.workload.calls, plan.concurrency, plan.timeout_s)
    )
    counts = cache_counts(fleet.urls).since(before)
    _judge(prepared, played, tally, tally.load)
    return run_figures(played, seconds, counts)


def _ask_again(
    plan: PoolBenchPlan, prepared: JudgedWorkload, urls: Sequence[str], tally: Tally, phase: Phase
) -> None:
    """Sends the last call of each session, one at a time: a pool has all of its prompt but the
    end."""
    calls: list[PoolCall] = prepared.workload.last_calls()
    played, _ = asyncio.run(play(urls, plan.model, calls, 1, plan.timeout_s))
    _judge(prepared, played, tally, phase)


def _judge(prepared: JudgedWorkload, played: Sequence[Played], tally: Tally, phase: Phase) -> None:
    for one in played:
        foreign = prepared.workload.maker.foreign_to(one.call.question, one.answer.text)
        tally.count(phase, one.call.question, one.answer, foreign)


def run_figures(played: Sequence[Played], seconds: float, counts: CacheCounts) -> dict[str, Any]:
    """Returns the figures of one run. A turn after the first returns to a prefix that was seen
    before."""
    whole = [one for one in played if one.answer.outcome == "answered"]
    prompt_tokens = sum(one.answer.prompt_tokens for one in whole)
    told = sum(one.answer.cached_tokens for one in whole)
    return {
        "requests": len(played),
        "answered": len(whole),
        "seconds": seconds,
        "requests_per_s": len(whole) / seconds,
        "prompt_tokens_per_s": prompt_tokens / seconds,
        "hit_ratio": told / prompt_tokens if prompt_tokens else 0.0,
        "local_hit_ratio": counts.local / counts.asked if counts.asked else 0.0,
        "pool_hit_ratio": counts.external / counts.asked if counts.asked else 0.0,
        "returning_ttft_s": _spread([one.ttft_s for one in whole if one.call.turn]),
        "first_ttft_s": _spread([one.ttft_s for one in whole if not one.call.turn]),
    }


def _spread(values: Sequence[float]) -> dict[str, float]:
    return {"mean": statistics.fmean(values or [0.0]), **percentiles(values, 90)}


def _figures(rows: Mapping[PoolName, Row]) -> dict[str, Any]:
    twin = rows["none"].load
    return {name: _row_figures(row, twin) for name, row in rows.items()}


def _row_figures(row: Row, twin: Phase) -> dict[str, Any]:
    load = row.load
    return {
        "absent": row.absent,
        "median": _median(row.rounds),
        "load": counts_of(load),
        "after_one": counts_of(row.after_one),
        "after_all": counts_of(row.after_all),
        "p_more_wrong_than_twin": fisher_p(
            load.unexplained, load.answered, twin.unexplained, twin.answered
        ),
        "p_more_differing_than_twin": fisher_p(
            load.differing, load.answered, twin.differing, twin.answered
        ),
        "examples": row.examples,
        "rounds": row.rounds,
    }


def _median(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if not rounds:
        return {}
    return {
        key: _median([one[key] for one in rounds])
        if isinstance(value, dict)
        else statistics.median(one[key] for one in rounds)
        for key, value in rounds[0].items()
    }


def _words(figures: dict[str, Any], load: Phase) -> str:
    back, first = figures["returning_ttft_s"], figures["first_ttft_s"]
    return (
        f"hits {figures['hit_ratio']:.3f} (vLLM {figures['local_hit_ratio']:.3f}, pool"
        f" {figures['pool_hit_ratio']:.3f}), TTFT {back['mean']:.2f} s (P90 {back['p90']:.2f}),"
        f" first {first['mean']:.2f} s, {figures['requests_per_s']:.2f} requests/s;"
        f" {_phase_words(load)}"
    )


def _phase_words(phase: Phase) -> str:
    share = phase.cached_tokens / phase.prompt_tokens if phase.prompt_tokens else 0.0
    return (
        f"{phase.unexplained} wrong, {phase.kinds['near_tie']} near-ties, {phase.foreign} foreign,"
        f" {phase.failed.total()} failed of {phase.asked}; hits {share:.3f}"
    )
