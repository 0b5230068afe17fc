"""FAST'25 Fig. 9: how much of the prompts one LRU cache holds, by its capacity; Fig. 10: caches of
their own against one pool, and how much of that difference is a matter of routing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moonpool.sim.capacity import prompts_of
from moonpool.sim.defaults import DEFAULTS
from moonpool.trace.row import TraceRow
from moonpool_lab.oracle.hit_ratios import Routing, hit_ratios, split_hit_ratios
from papers.finding import Check, Finding, FindingRow
from papers.mooncake.runs import ClusterRun, Overrides, serve
from papers.mooncake.workload import TABLE_2, MooncakeWorkload, find_workload, read_workload
from papers.options import Options
from papers.plot import Panel, PlotSeries, bars

BLOCK_TOKENS: int = DEFAULTS["pool"]["block_tokens"]
NODE_TOKENS: int = DEFAULTS["pool"]["dram_tokens_per_instance"]
MILLION = 1_000_000
CAPACITIES = (10_000, 100_000, *(n * MILLION for n in (1, 2, 4, 5, 8, 10, 50)))
FIG_9 = {  # hit ratio by token at each of CAPACITIES, and at last without a limit
    "conversation": (0.045, 0.073, 0.087, 0.12, 0.215, 0.247, 0.30, 0.326, 0.398, 0.401),
    "toolagent": (0.173, 0.363, 0.386, 0.414, 0.484, 0.505, 0.544, 0.561, 0.595, 0.595),
    "synthetic": (0.0, 0.012, 0.146, 0.235, 0.38, 0.435, 0.545, 0.589, 0.658, 0.658),
}
TOLERANCE = 0.04
NUM_CACHES = 10


class Fig10(NamedTuple):
    """Hit ratios with a cache for each instance, then with one pool."""

    local_hit: float
    global_hit: float
    local_s: float
    global_s: float


FIG_10 = Fig10(0.169, 0.375, 1.379, 1.051)
ROUTINGS: dict[str, tuple[Routing, int]] = {
    "longest match, first of equals": ("first", 0),
    "longest match, least loaded of equals": ("least-loaded", 0),
    "in turn": ("round-robin", 0),
    "longest match of more than 512 tokens": ("least-loaded", 512 // BLOCK_TOKENS),
}


def run(options: Options) -> Finding:
    conversation = read_workload(options, "conversation")
    workloads = [conversation, *(find_workload(options, name) for name in list(TABLE_2)[1:])]
    curves: dict[str, tuple[float, ...]] = {}
    for each in workloads:
        options.progress(each.title)
        curves[each.title] = curve(each, (*CAPACITIES, None))
    routed = _routed(options, conversation)
    local, pooled = (_simulated(options, conversation, p) for p in ("cache-aware", POOLED))
    return Finding(
        name="mooncake-hit-ratio",
        title="Hit ratio by capacity, and of local caches against one pool",
        source="Mooncake, FAST'25 Figs 9 and 10",
        paper_inputs=(
            "capacity in tokens, LRU, share of all prompt tokens found, blocks of 256 tokens",
            "Fig. 10: 10 prefill nodes of 3 M tokens each, answers cut to one token",
        ),
        chosen_inputs=(
            *(each.origin for each in workloads),
            "hits are leading full blocks, as they are served",
            (
                "Fig. 10 in the simulator: 10 nodes that only prefill, the trace at its own speed; "
                "local: placement cache-aware, global: kvcache-centric"
            ),
        ),
        rows=(*_curve_rows(workloads, curves), *_fig_10_rows(routed, local, pooled)),
        checks=_checks(curves[conversation.title], routed, local, pooled),
        notes=NOTES,
        panels=(_curve_panel(workloads, curves), _fig_10_panel(routed, local, pooled)),
    )


POOLED = "kvcache-centric"
POOL = "one pool of 30 M tokens"
NOTES = (
    (
        "The trace names blocks of 512 tokens: of two prompts that part inside of one, the half "
        "that they may share is not known, and the system prompt counts as 512 tokens. That is "
        "the .02 to .03 by which ours is below the paper's at every capacity."
    ),
    (
        "Fig. 10's local hit ratio is that of one 3 M token cache, not of ten. By longest match "
        "alone that is what happens: all prompts share the system prompt, so the node that has "
        "it gets every request, and nine caches stay empty. Leaving out matches of the system "
        "prompt alone, ten caches that share nothing find as much as one pool of 30 M tokens."
    ),
    (
        "In the simulator cache-aware placement weighs the queue too, so it spreads the load and "
        "its caches find most of what the pool does; what the pool gains is speed under load, "
        "not the paper's factor of 2.2 in hits."
    ),
)


def curve(workload: MooncakeWorkload, capacities: Sequence[int | None]) -> tuple[float, ...]:
    """Returns the share of the workload's tokens that one LRU cache finds, by the cache's capacity
    in tokens."""
    prompts = list(prompts_of(workload.rows, workload.block_tokens, BLOCK_TOKENS))
    found = []
    for tokens in capacities:
        blocks = None if tokens is None else tokens // BLOCK_TOKENS
        found.append(hit_ratios(prompts, "lru", blocks, BLOCK_TOKENS).by_token)
    return tuple(found)


def _tokens(tokens: int | None) -> str:
    if tokens is None:
        return "unbounded"
    return f"{tokens // MILLION} M tokens" if tokens >= MILLION else f"{tokens:,} tokens"


def _routed(options: Options, workload: MooncakeWorkload) -> dict[str, tuple[float, float]]:
    """Returns hit ratio and imbalance by routing. Prompts come in order, without times."""
    prompts = list(prompts_of(workload.rows, workload.block_tokens, BLOCK_TOKENS))
    found = {}
    for name, (routing, ignored) in ROUTINGS.items():
        options.progress(f"ten caches, {name}")
        split = split_hit_ratios(
            prompts,
            NUM_CACHES,
            NODE_TOKENS // BLOCK_TOKENS,
            routing,
            ignored,
            block_tokens=BLOCK_TOKENS,
        )
        found[name] = (split.ratios.by_token, split.imbalance)
    pool = hit_ratios(prompts, "lru", NUM_CACHES * NODE_TOKENS // BLOCK_TOKENS, BLOCK_TOKENS)
    found[POOL] = (pool.by_token, 1.0)
    return found


def _simulated(options: Options, workload: MooncakeWorkload, placement: str) -> ClusterRun:
    options.progress(f"Fig. 10, {placement}")
    rows = [TraceRow(row.arrived_s, row.input_tokens, 1, row.hash_ids) for row in workload.rows]
    prefills = MooncakeWorkload(workload.name, rows, workload.block_tokens, True, workload.origin)
    # Uses mixed instances, because a cluster needs decode instances, though nothing decodes here.
    overrides: Overrides = {
        "cluster": {"prefill": 0, "decode": 0, "mixed": NUM_CACHES},
        "conductor": {"admission": "none", "placement": placement},
    }
    return serve(prefills, overrides, options.seed)


def _curve_rows(
    workloads: list[MooncakeWorkload], curves: dict[str, tuple[float, ...]]
) -> list[FindingRow]:
    rows = []
    for workload in workloads:
        note = "" if workload.is_original else "only the last of the generated was aimed at"
        for number, tokens in enumerate((*CAPACITIES, None)):
            paper, ours = FIG_9[workload.name][number] or None, curves[workload.title][number]
            label = f"Fig. 9, {workload.title}, {_tokens(tokens)}"
            why = note or ("" if paper is None else f"{ours - paper:+.3f}")
            rows.append(FindingRow(label, "share", paper, ours, why))
    return rows


def _fig_10_rows(
    routed: dict[str, tuple[float, float]], local: ClusterRun, pooled: ClusterRun
) -> list[FindingRow]:
    def saved(own_s: float, pool_s: float) -> float:
        return 100 * (1 - pool_s / own_s)

    queue = "spread by the queue as well as by what is cached, see the note"
    rows = [
        FindingRow("Fig. 10, hits, local", "share", FIG_10.local_hit, local.hit_ratio, queue),
        FindingRow("Fig. 10, hits, global", "share", FIG_10.global_hit, pooled.hit_ratio),
        FindingRow("Fig. 10, prefill GPU time, local", "s", FIG_10.local_s, local.prefill_s, queue),
        FindingRow("Fig. 10, prefill GPU time, global", "s", FIG_10.global_s, pooled.prefill_s),
        FindingRow(
            "Fig. 10, GPU time saved by the pool",
            "%",
            saved(FIG_10.local_s, FIG_10.global_s),
            saved(local.prefill_s, pooled.prefill_s),
        ),
    ]
    for name, (ratio, imbalance) in routed.items():
        paper = FIG_10.local_hit if name == FIRST else None
        note = f"no time, no queue; busiest cache: {imbalance:.3g} x the mean"
        rows.append(
            FindingRow(
                f"Ten caches by {name}" if name in ROUTINGS else name[0].upper() + name[1:],
                "share",
                paper,
                ratio,
                note,
            )
        )
    return rows


FIRST = "longest match, first of equals"
STICKY = "longest match of more than 512 tokens"


def _checks(
    found: tuple[float, ...],
    routed: dict[str, tuple[float, float]],
    local: ClusterRun,
    pooled: ClusterRun,
) -> tuple[Check, ...]:
    papers = FIG_9["conversation"]
    off = max(abs(ours - paper) for ours, paper in zip(found, papers, strict=True))
    pool = routed[POOL][0]
    return (
        Check(
            f"conversation is within {TOLERANCE} at every capacity (at most {off:.3f} off)",
            off <= TOLERANCE,
        ),
        Check(
            "one pool finds more than caches of their own, and needs less GPU time",
            pooled.hit_ratio > local.hit_ratio and pooled.prefill_s < local.prefill_s,
        ),
        Check(
            "by longest match alone, one of ten caches gets every request",
            routed[FIRST][1] > NUM_CACHES - 0.01,
        ),
        Check(
            "without matches of the system prompt, ten caches find as much as one pool (to .01)",
            abs(routed[STICKY][0] - pool) <= 0.01,
        ),
    )


def _curve_panel(workloads: list[MooncakeWorkload], curves: dict[str, tuple[float, ...]]) -> Panel:
    at = tuple(float(tokens) for tokens in CAPACITIES)
    series = [
        PlotSeries(each.name, "paper", "line", at, FIG_9[each.name][:-1]) for each in workloads
    ]
    series += [
        PlotSeries(title, "ours", "line", at, values[:-1]) for title, values in curves.items()
    ]
    return Panel(
        "Fig. 9: one LRU cache", "capacity (tokens)", "share of tokens", tuple(series), log_x=True
    )


def _fig_10_panel(
    routed: dict[str, tuple[float, float]], local: ClusterRun, pooled: ClusterRun
) -> Panel:
    return Panel(
        "Fig. 10: conversation, 10 nodes x 3 M tokens",
        "caches",
        "share of tokens",
        (
            bars("Fig. 10", "paper", {"local": FIG_10.local_hit, "global": FIG_10.global_hit}),
            bars("simulated", "ours", {"local": local.hit_ratio, "global": pooled.hit_ratio}),
            bars("longest match, no queue", "ours", {"local": routed[FIRST][0]}),
            bars("matches > 512 tokens, no queue", "ours", {"local": routed[STICKY][0]}),
        ),
    )
