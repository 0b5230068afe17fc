"""SARATHI's claims on this engine: measured, and as the cost model fitted in the same run predicts.

Measures the decode speed-up by chunk size (Fig. 8, Table 4), throughput over P:D with its peak
(Fig. 10), the time between tokens under load by batching policy (Sarathi-Serve Fig. 9, Table 4),
and how long a long prompt occupies the KVCache (Mooncake v3 section 5). One thread computes; no
constant is tuned to the run.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from benchmarks.suite.engine.busy_memory import bench_occupation
from benchmarks.suite.engine.timed_instance import UNLIMITED, TimedJob, TimedResult, serve
from moonpool.config.tables import Batching
from moonpool.cost.fitted import FittedCost
from moonpool.cost.model import Chunk
from moonpool.distributions import nearest_rank
from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.types import BlockId, SamplingParams
from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.calibrate import fit_samples, measure_samples
from moonpool_engine.engine.ops import empty_cache
from moonpool_engine.engine.runner import Engine, choose_ops, make_layout

KV_TOKENS = 32_768
BLOCK_TOKENS = 64
BATCH, CONTEXT_TOKENS = 6, 1024  # as SARATHI's headline on LLaMA-13B
CHUNKS = (32, 64, 128, 256)
SWEEP_CHUNK, SWEEP_BATCH, SWEEP_SEQUENCE_TOKENS = 64, 4, 256
SHARES = (0.25, 0.5, 1.0, 2.0, 4.0)  # of the balanced P:D
LOAD_JOBS, LOAD_SHARE = 24, 0.7
STRICT = 5.0  # Sarathi-Serve's strict SLO, in clean decode steps
LONG_TOKENS = 2048
PAPER_SPEED_UPS = {"LLaMA-13B A6000, 1K/2K/3K": (5.45, 3.26, 2.51), "chunk": 256, "batch": 6}
PAPER_STALL = "whole prompts in hybrid batches raise TBT up to 28.3 times (Sarathi-Serve Fig. 9)"
POLICIES: dict[str, tuple[Batching, int]] = {
    "whole prompts": ("whole-prompts", 512),
    "prefill first": ("prefill-first", 512),
    "chunked": ("chunked", 512),
    "chunked, budget by SLO": ("chunked", 512),
}
Say = Callable[[str], None]


@dataclass(slots=True)
class _Bench:
    engine: Engine
    cost: FittedCost
    repeats: int
    say: Say

    def serve(self, jobs: list[TimedJob], config: InstanceConfig, measured: bool) -> TimedResult:
        layout, blocks = self.engine.layout, self.engine.num_blocks
        return serve(jobs, config, layout, blocks, self.cost, self.engine if measured else None)


def bench_sarathi(model: str, repeats: int, seed: int, say: Say) -> dict[str, Any]:
    """Returns all figures of one model in bfloat16."""
    torch.set_num_threads(1)
    loaded = open_model(model, "bfloat16")
    ops = choose_ops(loaded.dtype)
    layout = make_layout(loaded, BLOCK_TOKENS, ops)
    engine = Engine(loaded, ops, empty_cache(layout, layout.blocks_for(KV_TOKENS)))
    say("fitting the cost model")
    cost = fit_samples(measure_samples(engine, 6.0))
    bench = _Bench(engine, cost, repeats, say)
    return {
        "model": model,
        "ops": engine.ops_name,
        "seed": seed,
        "cost": msgspec.to_builtins(cost),
        "decode_speed_up": [_speed_up(bench, chunk) for chunk in CHUNKS],
        "ratio_sweep": _ratio_sweep(bench),
        "load": _load(bench, seed),
        "occupation": _occupation(bench, model),
        "paper": {"decode_speed_up": PAPER_SPEED_UPS, "stall": PAPER_STALL},
    }


# Single steps


def _sequence(name: str, new: int, context: int, first_block: int) -> StepEntry:
    blocks = -(-(new + context) // BLOCK_TOKENS)
    return StepEntry(
        attempt_id=AttemptId(name),
        new_token_ids=[(7 * t) % 251 for t in range(new)],
        start=context,
        block_ids=[BlockId(first_block + i) for i in range(blocks)],
        draw=SamplingParams(temperature=0.0),
    )


def _steps_s(bench: _Bench, steps: Sequence[tuple[int, int]]) -> list[float]:
    """Returns the best time of each step of (chunk, decodes). The steps take turns, so that a busy
    moment of the machine affects all of them."""
    built = [_step(chunk, decodes) for chunk, decodes in steps]
    rounds = [[bench.engine.step(step).seconds for step in built] for _ in range(bench.repeats + 1)]
    return [min(times) for times in zip(*rounds, strict=True)]


def _step(chunk: int, decodes: int) -> list[StepEntry]:
    per_sequence = -(-(CONTEXT_TOKENS + 1) // BLOCK_TOKENS)
    steps = [_sequence(f"d{i}", 1, CONTEXT_TOKENS, i * per_sequence) for i in range(decodes)]
    if chunk:
        steps.append(_sequence("p", chunk, 0, decodes * per_sequence))
    return steps


def _predicted_s(cost: FittedCost, chunk: int, decodes: int) -> float:
    chunks = [Chunk(chunk, 0, 0, last=True)] if chunk else []
    return cost.step_s(chunks, decodes, decodes * (CONTEXT_TOKENS + 1))


def _speed_up(bench: _Bench, chunk_tokens: int) -> dict[str, Any]:
    """Returns the speed-up of a decode as the paper defines it: its share of a decode-only step,
    divided by the time that one more decode adds to a chunk with room for decodes."""
    riding = BATCH - 1
    new = chunk_tokens - riding
    row: dict[str, Any] = {"chunk_tokens": chunk_tokens, "batch": BATCH, "context": CONTEXT_TOKENS}
    steps = ((0, BATCH), (new, 0), (new, riding))
    for name, (alone_s, prefill_s, hybrid_s) in (
        ("measured", _steps_s(bench, steps)),
        ("predicted", [_predicted_s(bench.cost, *step) for step in steps]),
    ):
        # Below the noise there is no speed-up to tell.
        riding_s = (hybrid_s - prefill_s) / riding
        apart_s = prefill_s + alone_s * riding / BATCH
        row[name] = {
            "decode_alone_s": alone_s / BATCH,
            "decode_riding_s": riding_s,
            "decode_speed_up": alone_s / BATCH / riding_s if riding_s > 0 else float("nan"),
            "hybrid_s": hybrid_s,
            "end_to_end": apart_s / hybrid_s,
        }
    measured, predicted = row["measured"], row["predicted"]
    bench.say(
        f"chunk {chunk_tokens:>4}: decodes {measured['decode_speed_up']:.2f} x faster, both"
        f" {measured['end_to_end']:.2f} x (predicted {predicted['decode_speed_up']:.2f},"
        f" {predicted['end_to_end']:.2f})"
    )
    return row


# Workloads


def _ratio_sweep(bench: _Bench) -> dict[str, Any]:
    """Throughput of chunked over prefill-first batches by P:D, all requests at once."""
    balance = (SWEEP_CHUNK - (SWEEP_BATCH - 1)) / (SWEEP_BATCH - 1)
    rows = []
    for share in SHARES:
        ratio = balance * share
        decodes = max(round(SWEEP_SEQUENCE_TOKENS / (1 + ratio)), 1)
        prompt = SWEEP_SEQUENCE_TOKENS - decodes
        jobs = [TimedJob(0.0, prompt, decodes + 1)] * (4 * SWEEP_BATCH)
        row: dict[str, Any] = {"prompt_tokens": prompt, "decode_tokens": decodes}
        row["ratio"] = prompt / decodes
        for name, measured in (("measured", True), ("predicted", False)):
            apart = InstanceConfig(
                chunk_tokens=SWEEP_BATCH * prompt,
                max_sequences=SWEEP_BATCH,
                prefix_caching=False,
                batching="prefill-first",
            )
            chunked = msgspec.structs.replace(apart, chunk_tokens=SWEEP_CHUNK, batching="chunked")
            apart_s = bench.serve(jobs, apart, measured).makespan_s
            row[name] = apart_s / bench.serve(jobs, chunked, measured).makespan_s
        bench.say(f"P:D {row['ratio']:.1f}: {row['measured']:.3f} x ({row['predicted']:.3f})")
        rows.append(row)
    best = {name: max(rows, key=lambda r: r[name])["ratio"] for name in ("measured", "predicted")}
    return {"balance": balance, "peak_at": best, "rows": rows}


def _load(bench: _Bench, seed: int) -> dict[str, Any]:
    """TTFT and TBT of arrivals at random under each policy, at the same load."""
    rng = random.Random(seed)
    shapes = [(rng.randint(128, 512), rng.randint(16, 48)) for _ in range(LOAD_JOBS)]
    cost = bench.cost
    busy_s = sum(cost.prefill_s(p, 0) + cost.decode_step_s(4, 4 * p) / 4 * d for p, d in shapes)
    mean_gap_s = busy_s / LOAD_JOBS / LOAD_SHARE
    jobs, at_s = [], 0.0
    for prompt, output in shapes:
        jobs.append(TimedJob(at_s, prompt, output))
        at_s += rng.expovariate(1.0) * mean_gap_s
    clean_s = cost.decode_step_s(8, 8 * 512)
    slo_s = STRICT * clean_s
    found: dict[str, Any] = {"slo_tbt_s": slo_s, "clean_step_s": clean_s, "jobs": LOAD_JOBS}
    for name, (batching, chunk_tokens) in POLICIES.items():
        config = InstanceConfig(
            chunk_tokens=chunk_tokens,
            prefix_caching=False,
            batching=batching,
            tbt_slo_s=slo_s if "SLO" in name else UNLIMITED,
        )
        found[name] = {
            "measured": _tails(bench.serve(jobs, config, True), slo_s),
            "predicted": _tails(bench.serve(jobs, config, False), slo_s),
        }
        tails = found[name]["measured"]
        bench.say(
            f"{name}: TBT p99 {tails['tbt_p99_s']:.3f} s, {tails['within_slo']:.1%} within"
            f" {slo_s:.3f} s; TTFT p50 {tails['ttft_p50_s']:.2f} s"
            f" (predicted p99 {found[name]['predicted']['tbt_p99_s']:.3f} s)"
        )
    return found


def _tails(timed: TimedResult, slo_s: float) -> dict[str, float]:
    gaps, ttfts = sorted(timed.gaps_s), sorted(timed.ttft_s)
    return {
        "tbt_p50_s": nearest_rank(gaps, 0.5),
        "tbt_p99_s": nearest_rank(gaps, 0.99),
        "tbt_max_s": gaps[-1],
        "within_slo": sum(gap <= slo_s for gap in gaps) / len(gaps),
        "ttft_p50_s": nearest_rank(ttfts, 0.5),
        "ttft_p99_s": nearest_rank(ttfts, 0.99),
        "makespan_s": timed.makespan_s,
    }


def _occupation(bench: _Bench, model: str) -> dict[str, Any]:
    tbt_s = STRICT * bench.cost.decode_step_s(8, 8 * 512)
    return bench_occupation(model, LONG_TOKENS, tbt_s, min(bench.repeats, 3), bench.say)
