"""Measures reuse by eviction policy: a smaller cache's share of an unlimited cache's hits.

Prompts pass through one block pool in the order of their arrival, without time. The size of a pool
is a share of the distinct blocks of the workload, which is what an unlimited cache would hold at
the end. Belady's optimum knows the future. Figures do not depend on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from moonpool.config.tables import EVICTIONS
from moonpool.sim.capacity import PromptBlocks, prompts_of
from moonpool.trace.builtin import BUILT_IN, BUILT_IN_MIXES
from moonpool.trace.generate import BLOCK_TOKENS, generate, generate_mix
from moonpool.trace.reader import open_trace
from moonpool.trace.row import TraceRow
from moonpool_lab.oracle.hit_ratios import belady_hit_ratio, hit_ratios

WORKLOADS = ("agents", "conversation", "toolagent", "hot-set", "scan")
"""The default workloads: sessions with pauses, chats, tools, popular documents, and single
documents between sessions."""

KNOWN = (*BUILT_IN, *BUILT_IN_MIXES)


def bench_reuse(
    traces: Sequence[str],
    workloads: Sequence[str],
    seeds: Sequence[int],
    shares: Sequence[int],
    hours: float,
    echo: Callable[[str], None],
) -> dict[str, Any]:
    """A share of n is a pool of 1/n of the distinct blocks. Raises TraceError."""
    rows: list[dict[str, Any]] = []
    for name, seed, prompts in _workloads(traces, workloads, seeds, hours):
        distinct = len({key for prompt in prompts for key in prompt.keys})
        unlimited = hit_ratios(prompts, "lru", None)
        for share in shares:
            capacity_blocks = max(distinct // share, 1)
            kept = _reuse(prompts, capacity_blocks, unlimited.hit_blocks)
            row = {
                "workload": name,
                "seed": seed,
                "requests": len(prompts),
                "unlimited_hit_ratio": round(unlimited.by_prefix, 4),
                "capacity_share": f"1/{share}",
                "capacity_blocks": capacity_blocks,
                "reuse_share": kept,
            }
            rows.append(row)
            shown = ", ".join(f"{policy} {one:.1%}" for policy, one in kept.items())
            echo(f"{name} seed {seed}, 1/{share}: {shown}")
    return {"hours": hours, "rows": rows}


def _workloads(
    traces: Sequence[str], workloads: Sequence[str], seeds: Sequence[int], hours: float
) -> Iterator[tuple[str, int, list[PromptBlocks]]]:
    for path in traces:
        trace = open_trace(path)
        yield Path(path).name, 0, list(prompts_of(trace, trace.info.block_tokens, BLOCK_TOKENS))
    for name in workloads:
        for seed in seeds:
            rows = _generated(name, seed, 3600.0 * hours)
            yield name, seed, list(prompts_of(rows, BLOCK_TOKENS, BLOCK_TOKENS))


def _generated(name: str, seed: int, duration_s: float) -> Iterator[TraceRow]:
    if name in BUILT_IN_MIXES:
        return generate_mix(BUILT_IN_MIXES[name], duration_s=duration_s, seed=seed)
    return generate(BUILT_IN[name], duration_s=duration_s, seed=seed)


def _reuse(
    prompts: Sequence[PromptBlocks], capacity_blocks: int, unlimited_blocks: int
) -> dict[str, float]:
    """Returns the hits of each policy, divided by those of an unlimited cache."""
    num_blocks = sum(len(prompt.keys) for prompt in prompts)
    hits: dict[str, float] = {
        policy: hit_ratios(prompts, policy, capacity_blocks).hit_blocks for policy in EVICTIONS
    }
    hits["belady"] = belady_hit_ratio(prompts, capacity_blocks) * num_blocks
    return {policy: round(found / max(unlimited_blocks, 1), 4) for policy, found in hits.items()}
