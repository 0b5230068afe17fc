"""Compares the speed of the engine's operations with the limits of one core, measured in the same
run.

    python benchmarks/ops.py [--rounds 12] [--dtype bfloat16] [--isa ISA] [--json FILE]

Limits: the rate of a large torch matmul of the same type, and the bandwidth at which torch sums up
256 MB on large pages. Each row names the limit that binds it and its share of that limit (streams
that prefetch read faster than torch's sum, so shares can be above 1). Linears are also compared
with oneDNN's prepacked linear, the fastest one in torch. Limits and operations take turns, and the
best of many runs counts. Times are the CPU time of one thread, so that other processes on the core
cost only cache. Weights and KVCache are too large for the caches wherever memory is the limit. Seed
0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from moonpool.protocol.block_layout import BlockLayout
from moonpool_engine.engine.native.linear import PackedMemory
from moonpool_engine.engine.native.ops import NativeLinear, NativeOps
from moonpool_engine.engine.ops import AttendArgs, HeadShape, KvCache, StepMeta, empty_cache

READ_BYTES = 256 << 20
SPILL_BYTES = 96 << 20  # size of weights or KVCache, chosen so that no cache holds them
BLOCK_TOKENS = 64
# Linears of one layer as (in, out), and the heads, of a 146M and a 493M model.
MODELS = {
    "m150": ([(896, 1152), (896, 896), (896, 5632), (2816, 896)], HeadShape(14, 2, 64)),
    "m500": ([(1280, 1792), (1280, 1280), (1280, 8192), (4096, 1280)], HeadShape(20, 4, 64)),
}
ROWS = (1, 8, 32, 512, 2048)
CHUNKS = ((3840, 256), (0, 2048))  # (tokens before, rows)
DECODE_CONTEXT, BATCHES = 4096, (1, 8)


@dataclass(frozen=True)
class OpsJob:
    """One operation to time: what it computes, and how many bytes it must read per call."""

    name: str
    run: Callable[[], object]
    flops: float
    num_bytes: float


@dataclass(frozen=True)
class Result:
    name: str
    seconds: float
    gflops: float
    gb_per_s: float
    limit: str
    share: float


def best_s(run: Callable[[], object], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats):
        start = time.thread_time_ns()
        run()
        best = min(best, (time.thread_time_ns() - start) / 1e9)
    return best


def limit_jobs(dtype: torch.dtype) -> dict[str, OpsJob]:
    x, y = torch.randn(2, 2048, 2048).to(dtype)
    memory = PackedMemory().take(READ_BYTES).view(torch.float32).normal_()
    return {
        "gemm": OpsJob("gemm", lambda: x @ y, 2.0 * 2048**3, 0),
        "memory": OpsJob("memory", memory.sum, 0, READ_BYTES),
    }


def linear_jobs(ops: NativeOps, model: str, rows: int, dtype: torch.dtype) -> list[OpsJob]:
    """Returns all linears of enough layers, moonpool's and oneDNN's."""
    shapes, _ = MODELS[model]
    size = torch.finfo(dtype).bits // 8
    layer_elements = sum(inner * outer for inner, outer in shapes)
    layers = -(-SPILL_BYTES // (layer_elements * size)) if rows < 128 else 1
    inputs = {inner: torch.randn(rows, inner).to(dtype) for inner, _ in shapes}
    ours: list[tuple[NativeLinear, Tensor]] = []
    peers: list[tuple[Tensor, Tensor]] = []
    reorder = getattr(torch.ops.mkldnn, "_reorder_linear_weight", None)
    for inner, outer in shapes * layers:
        weight = torch.randn(outer, inner).to(dtype)
        ours.append((ops.linear(weight, None), inputs[inner]))
        if reorder is not None:
            peers.append((reorder(weight, rows), inputs[inner]))

    def run_ours() -> None:
        for linear, x in ours:
            linear(x)

    def run_peers() -> None:
        for packed, x in peers:
            torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")

    flops, num_bytes = 2.0 * rows * layer_elements * layers, float(layer_elements * layers * size)
    jobs = [OpsJob(f"{model} linears M={rows}", run_ours, flops, num_bytes)]
    return jobs + ([OpsJob("  oneDNN", run_peers, flops, num_bytes)] if peers else [])


def make_step(before: int, rows: int, batch: int, blocks: int) -> StepMeta:
    """Makes a step of `batch` sequences, each over its own permuted blocks."""
    per_sequence = -(-(before + rows) // BLOCK_TOKENS)
    tables = torch.randperm(blocks)[: batch * per_sequence].view(batch, per_sequence)
    return StepMeta(
        positions=torch.arange(before, before + rows).repeat(batch).int(),
        row_starts=torch.arange(0, batch * rows + 1, rows).int(),
        context_starts=torch.full((batch,), before).int(),
        block_tables=tables.int().contiguous(),
        num_rows=batch * rows,
        num_sequences=batch,
    )


def attend_job(
    ops: NativeOps, model: str, before: int, rows: int, batch: int, dtype: torch.dtype
) -> OpsJob:
    heads = MODELS[model][1]
    context = before + rows
    token_bytes = 2 * heads.num_kv_heads * heads.head_dim * (torch.finfo(dtype).bits // 8)
    read_bytes = batch * context * token_bytes
    layers = -(-SPILL_BYTES // read_bytes) if rows == 1 else 1
    layout = BlockLayout(
        model_fingerprint="benchmark",
        dtype=str(dtype).removeprefix("torch."),
        block_tokens=BLOCK_TOKENS,
        num_layers=layers,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
    )
    blocks = batch * layout.blocks_for(context)
    cache: KvCache = empty_cache(layout, blocks)
    cache.blocks.normal_()
    meta = make_step(before, rows, batch, blocks)
    q = torch.randn(batch * rows, heads.num_heads, heads.head_dim).to(dtype)

    def run() -> None:
        for layer in range(layers):
            ops.attend(q, AttendArgs(heads, cache, layer, meta, heads.head_dim**-0.5))

    pairs = batch * sum(range(before + 1, context + 1))
    flops = 4.0 * heads.num_heads * heads.head_dim * pairs * layers
    kind = f"decode B={batch} ctx {context}" if rows == 1 else f"attention {rows}x{context}"
    return OpsJob(f"{model} {kind}", run, flops, float(read_bytes * layers))


def all_jobs(ops: NativeOps, dtype: torch.dtype) -> Iterator[list[OpsJob]]:
    """Yields the jobs one by one, because together they would not fit in memory."""
    for model in MODELS:
        for rows in ROWS:
            yield linear_jobs(ops, model, rows, dtype)
        for before, rows in CHUNKS:
            yield [attend_job(ops, model, before, rows, 1, dtype)]
        for batch in BATCHES:
            yield [attend_job(ops, model, DECODE_CONTEXT - 1, 1, batch, dtype)]


def measure(
    ops: NativeOps, dtype: torch.dtype, rounds: int
) -> tuple[list[Result], dict[str, float]]:
    limits = limit_jobs(dtype)
    limit_s = dict.fromkeys(limits, float("inf"))
    taken: list[tuple[OpsJob, float]] = []
    for jobs in all_jobs(ops, dtype):
        seconds = [float("inf")] * len(jobs)
        for _ in range(rounds):
            for name, limit in limits.items():
                limit_s[name] = min(limit_s[name], best_s(limit.run, 1))
            for i, job in enumerate(jobs):
                seconds[i] = min(seconds[i], best_s(job.run, 2))
        taken += zip(jobs, seconds, strict=True)
    gemm = limits["gemm"].flops / limit_s["gemm"]
    memory = limits["memory"].num_bytes / limit_s["memory"]
    results = []
    for job, spent in taken:
        floor_s = {"gemm": job.flops / gemm, "memory": job.num_bytes / memory}
        binding = max(floor_s, key=lambda name: floor_s[name])
        rates = (job.flops / spent / 1e9, job.num_bytes / spent / 1e9)
        results.append(Result(job.name, spent, *rates, binding, floor_s[binding] / spent))
    return results, {"gemm_gflops": gemm / 1e9, "memory_gb_per_s": memory / 1e9}


def commit() -> str:
    git = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(
        git, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--isa", help="force a plainer instruction set than this CPU's best")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ops = NativeOps(options.isa)
    results, limits = measure(ops, getattr(torch, options.dtype), options.rounds)
    print(f"{options.dtype}, {ops.isa}, 1 thread, best of {options.rounds}, commit {commit()}")
    print(", ".join(f"{name} {value:.1f}" for name, value in limits.items()))
    print(f"{'':30s}{'ms':>10s}{'GF/s':>8s}{'GB/s':>8s}  share of limit")
    for row in results:
        print(
            f"{row.name:30s}{row.seconds * 1e3:10.3f}{row.gflops:8.0f}{row.gb_per_s:8.1f}"
            f"  {row.share:.2f} {row.limit}"
        )
    if options.json:
        found = {"limits": limits, "commit": commit(), "rows": [asdict(row) for row in results]}
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
