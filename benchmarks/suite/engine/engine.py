"""The engine against the machine's own limits, and against other engines on the same weights.

Every row, of moonpool or of a peer, is compared with two limits: its arithmetic divided by the
measured GEMM rate, and its bytes divided by the measured memory bandwidth. The limits and all
engines are measured in one run, with one thread each.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.suite.engine.engine_peers import measure_peers
from benchmarks.suite.engine.engine_rows import (
    ELEMENT_BYTES,
    EngineBenchRows,
    decode_bytes,
    decode_flops,
    prefill_bytes,
    prefill_flops,
)
from benchmarks.suite.engine.machine_limits import (
    gemm_flops_per_s,
    has_bf16_products,
    read_bytes_per_s,
)
from benchmarks.suite.engine.single_instance import SoloInstance
from moonpool_engine.engine.spec import ModelSpec

__all__ = [
    "bench_engine",
    "machine_limits",
    "measure_rows",
    "row_lines",
    "shares",
]

Report = Callable[[str], None]


def bench_engine(
    model: str,
    rows: EngineBenchRows,
    peers: Mapping[str, str],
    peer_eager: bool,
    repeats: int,
    say: Report,
) -> dict[str, Any]:
    """Returns all figures of one model in bfloat16. `peers`: a Python for each peer. Raises
    BenchError."""
    torch.set_num_threads(1)
    say("measuring the machine's limits")
    before = machine_limits()
    solo = SoloInstance(model, "bfloat16", kv_tokens=rows.kv_tokens, chunk_tokens=rows.chunk_tokens)
    figures = measure_rows(solo, rows, repeats, say)
    figures["model"], figures["ops"] = model, solo.engine.ops_name
    spec = solo.spec
    del solo
    if peers:
        figures["peers"] = measure_peers(model, peers, rows, repeats, peer_eager, say)
    after = machine_limits()
    limits = {name: max(before[name], after[name]) for name in before}
    figures["limits"] = limits | {"before": before, "after": after}
    for found in (figures, *figures.get("peers", {}).values()):
        if "error" not in found:
            found["shares"] = shares(spec, rows, found, limits)
    for line in row_lines(figures):
        say(line)
    return figures


def machine_limits() -> dict[str, float]:
    """Measures one thread now. A limit that is low only at the start or the end of the run was
    lowered by other load. The GEMM is of float32 where the CPU cannot multiply bfloat16: there
    kernels multiply float32."""
    dtype = torch.bfloat16 if has_bf16_products() else torch.float32
    return {
        "gemm_flops_per_s": gemm_flops_per_s(dtype),
        "read_bytes_per_s": read_bytes_per_s(),
    }


def shares(
    spec: ModelSpec,
    rows: EngineBenchRows,
    figures: Mapping[str, Any],
    limits: Mapping[str, float],
    weight_bytes: float = ELEMENT_BYTES,
) -> dict[str, Any]:
    """Returns which share of the GEMM rate and of the memory bandwidth each row reaches: its
    arithmetic and its bytes, divided by what the machine could do in the same time."""

    def share(flops: float, num_bytes: float, per_second: float) -> dict[str, float]:
        return {
            "gemm": flops * per_second / limits["gemm_flops_per_s"],
            "bandwidth": num_bytes * per_second / limits["read_bytes_per_s"],
        }

    found: dict[str, Any] = {"prefill": {}, "decode": {}}
    for size, rate in figures["prefill"].items():
        tokens = int(size)
        num_bytes = prefill_bytes(spec, tokens, rows.chunk_tokens, weight_bytes)
        found["prefill"][size] = share(prefill_flops(spec, tokens), num_bytes, rate / tokens)
    for context, by_batch in figures["decode"].items():
        length = int(context) + rows.steps / 2
        found["decode"][context] = {
            size: share(
                decode_flops(spec, int(size), length),
                decode_bytes(spec, int(size), length, weight_bytes),
                rate / int(size),
            )
            for size, rate in by_batch.items()
        }
    return found


def row_lines(figures: Mapping[str, Any]) -> list[str]:
    """A table for people: tokens/s of each row, ours with its shares, and ours over the best."""
    peers = {n: f for n, f in figures.get("peers", {}).items() if "error" not in f}
    names = "".join(f"{name:>11}" for name in peers)
    limits = figures["limits"]
    product = "bf16" if has_bf16_products() else "float32"
    lines = [
        (
            f"GEMM {limits['gemm_flops_per_s'] / 1e9:.0f} GFLOP/s {product}, memory read"
            f" {limits['read_bytes_per_s'] / 1e9:.1f} GB/s, one thread"
        ),
        f"{'tokens/s':<24}{'moonpool':>11}{names}  of GEMM  of memory  ours / best peer",
    ]

    def line(name: str, *path: str) -> str:
        rate, share = _at(figures, path), _at(figures["shares"], path)
        others = [_at(found, path) for found in peers.values()]
        cells = "".join(f"{other:>11.1f}" for other in others)
        over = f"{rate / max(others):>18.3f}" if others else ""
        gemm, bandwidth = share["gemm"], share["bandwidth"]
        return f"{name:<24}{rate:>11.1f}{cells}{gemm:>9.1%}{bandwidth:>11.1%}{over}"

    lines += [line(f"prefill {size}", "prefill", size) for size in figures["prefill"]]
    for context, by_batch in figures["decode"].items():
        lines += [
            line(f"decode {batch} x {context}", "decode", context, batch) for batch in by_batch
        ]
    return lines


def _at(figures: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    found: Any = figures
    for name in path:
        found = found[name]
    return found


def measure_rows(
    solo: SoloInstance, rows: EngineBenchRows, repeats: int, say: Report
) -> dict[str, Any]:
    """Tokens/s of our engine for every row."""
    rng = random.Random(1)
    vocab = solo.spec.vocab_size

    def prompt(num_tokens: int) -> list[int]:
        return [rng.randrange(vocab) for _ in range(num_tokens)]

    found: dict[str, Any] = {"prefill": {}, "decode": {}}
    solo.generate([prompt(rows.chunk_tokens)], [1])
    for tokens in rows.prefills:
        best_s = min(solo.generate([prompt(tokens)], [1]).seconds for _ in range(repeats))
        found["prefill"][str(tokens)] = tokens / best_s
        say(f"prefill of {tokens}: {tokens / best_s:.0f} tokens/s")
    for context in rows.contexts:
        rates = found["decode"][str(context)] = {}
        for batch in rows.batches:
            lengths = rows.lengths(batch, context)
            done = solo.generate([prompt(p) for p, _ in lengths], [answer for _, answer in lengths])
            # The first of these steps also ended a prompt.
            full = [seconds for seconds, tokens in done.steps if tokens == batch][1:]
            rates[str(batch)] = batch / statistics.median(full)
            say(f"decode at batch {batch}, context {context}: {rates[str(batch)]:.1f} tokens/s")
    return found
