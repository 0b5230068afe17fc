"""v3's Table 1: the hit ratio by eviction policy and capacity, and the highest possible ratio."""

from __future__ import annotations

from typing import NamedTuple

from moonpool.sim.capacity import prompts_of
from moonpool_lab.oracle.hit_ratios import belady_hit_ratio, hit_ratios
from papers.finding import Check, Finding, FindingRow
from papers.mooncake.workload import MooncakeWorkload, read_one_of
from papers.options import Options
from papers.plot import Panel, PlotSeries

CAPACITIES = (1_000, 10_000, 30_000, 50_000, 100_000)
PAPER = {  # at CAPACITIES, then without bound
    "lru": (0.30, 0.40, 0.48, 0.50, 0.51, 0.51),
    "lfu": (0.30, 0.35, 0.43, 0.49, 0.51, 0.51),
    "length-aware": (0.30, 0.35, 0.42, 0.48, 0.50, 0.51),
}
TITLES = {
    "lru": "LRU",
    "lfu": "LFU",
    "length-aware": "LengthAware",
    "predictive": "predictive",
    "belady": "Belady",
}
UNBOUNDED = 1 << 40
LOST_AT_MOST = 0.005


class CacheTableCell(NamedTuple):
    policy: str
    capacity: int


def run(options: Options) -> Finding:
    workload = read_one_of(options, "mooncake", "conversation")
    found = _measure(options, workload)
    is_paper = workload.name == "mooncake"
    return Finding(
        name="mooncake-table1",
        title="Hit ratio by eviction policy and capacity",
        source="Mooncake arXiv v3, Table 1",
        paper_inputs=(
            "capacities in blocks of 512 tokens, one cache for all, prompts in their order",
            "LRU, LFU, and LengthAware: like LFU, blocks late in their prompts first",
        ),
        chosen_inputs=(
            workload.origin,
            (
                "hits are leading blocks, the last, partial one counted as a block, as the trace "
                "names it; Belady's are all blocks"
            ),
            "LFU counts uses since the block was cached; ties go by age",
            (
                "predictive (moonpool's own) evicts the block whose use is least expected, by what "
                "it has learned so far of blocks of the same age, depth and number of uses"
            ),
        ),
        rows=_rows(found, is_paper),
        checks=_checks(found),
        notes=() if is_paper else (ANOTHER_TRACE,),
        panels=(_panel(found),),
    )


ANOTHER_TRACE = (
    "The paper's figures are those of the arXiv trace, which is not at hand "
    "(`moonpool trace download mooncake-arxiv`); the conversation trace shares less (at most .37 "
    "of its blocks) and is spread over more sessions, so small caches do worse. Only the order of "
    "policies can be compared."
)


def _measure(options: Options, workload: MooncakeWorkload) -> dict[CacheTableCell, float]:
    size = workload.block_tokens
    prompts = list(prompts_of(workload.rows, size, size, count_partial=True))
    found: dict[CacheTableCell, float] = {}
    for capacity in (*CAPACITIES, UNBOUNDED):
        for policy in (*PAPER, "predictive"):
            options.progress(f"{TITLES[policy]}, {_blocks(capacity)}")
            bound = None if capacity == UNBOUNDED else capacity
            found[CacheTableCell(policy, capacity)] = hit_ratios(
                prompts, policy, bound, size
            ).by_prefix
        found[CacheTableCell("belady", capacity)] = belady_hit_ratio(prompts, capacity)
    return found


def _blocks(capacity: int) -> str:
    return "unbounded" if capacity == UNBOUNDED else f"{capacity:,} blocks"


def _rows(found: dict[CacheTableCell, float], is_paper: bool) -> tuple[FindingRow, ...]:
    rows = []
    for number, capacity in enumerate((*CAPACITIES, UNBOUNDED)):
        for policy, title in TITLES.items():
            paper = PAPER[policy][number] if policy in PAPER else None
            note = "" if is_paper or paper is None else "the paper's is of another trace"
            label = f"{title}, {_blocks(capacity)}"
            rows.append(
                FindingRow(label, "share", paper, found[CacheTableCell(policy, capacity)], note)
            )
    return tuple(rows)


def _checks(found: dict[CacheTableCell, float]) -> tuple[Check, ...]:
    def least(policy: str, other: str, capacities: tuple[int, ...], margin: float = 0.0) -> bool:
        return all(
            found[CacheTableCell(policy, c)] >= found[CacheTableCell(other, c)] - margin
            for c in capacities
        )

    large = CAPACITIES[1:]
    return (
        Check(
            "from 10,000 blocks on, LRU is best of the paper's three, LengthAware last",
            least("lru", "lfu", large) and least("lfu", "length-aware", large),
        ),
        Check(
            "predictive beats LRU at 1,000 and 10,000 blocks",
            all(
                found[CacheTableCell("predictive", c)] > found[CacheTableCell("lru", c)]
                for c in CAPACITIES[:2]
            ),
        ),
        Check(
            f"predictive loses no more than {LOST_AT_MOST:g} to LRU anywhere",
            least("predictive", "lru", (*CAPACITIES, UNBOUNDED), LOST_AT_MOST),
        ),
    )


def _panel(found: dict[CacheTableCell, float]) -> Panel:
    at = tuple(float(capacity) for capacity in CAPACITIES)
    theirs = [
        PlotSeries(TITLES[policy], "paper", "line", at, values[:-1])
        for policy, values in PAPER.items()
    ]
    ours = [
        PlotSeries(
            title, "ours", "line", at, tuple(found[CacheTableCell(policy, c)] for c in CAPACITIES)
        )
        for policy, title in TITLES.items()
    ]
    return Panel(
        "Hit ratio (the paper's: arXiv trace)",
        "capacity (blocks of 512 tokens)",
        "share of blocks",
        (*theirs, *ours),
        log_x=True,
    )
