"""The most requests per second within v3's limits on P90 TTFT and P90 TBT, on four nodes: 3P+1D,
2P+2D, and vLLM on four nodes. The code that the experiments of Figs 11 and 12 share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from papers.constants import V3_QUICK_REQUESTS, V3_RATES, V3_REQUESTS
from papers.finding import FindingRow
from papers.mooncake.runs import VLLM_INPUTS, Overrides, cluster, serve, system
from papers.mooncake.v3_datasets import DataSet
from papers.mooncake.workload import MooncakeWorkload
from papers.options import Options
from papers.plot import Panel, bars

NODES = 4
TTFT_TIMES, TBT_TIMES = 10.0, 5.0
MOONCAKE, BALANCED, VLLM = "3P+1D", "2P+2D", "vLLM-4M"
ONE_BY_ONE = "vLLM-4M one by one"
"""vLLM without batches: each node serves one request at a time."""
PAPER_INPUTS = (
    (
        f"limits: P90 TTFT at most {TTFT_TIMES:g} times and P90 TBT at most {TBT_TIMES:g} times "
        "what they are at the lowest rate; Poisson arrivals; four nodes"
    ),
)
CHOSEN_INPUTS = (
    (
        f"one set of rates for all: {V3_RATES[0]:g} to {V3_RATES[-1]:.3g} requests a second in "
        "steps of a tenth; the capacity is the highest of them within both limits"
    ),
    "the limits are multiples of what 3P+1D does at the lowest rate, and hold for all three",
    "a request's TBT is the mean of the longest tenth of its gaps; no request is turned away",
    "nodes with the times of FAST'25's LLaMA3-70B, whose layers are those of v3's LLaMA2-70B",
    *VLLM_INPUTS,
)


@dataclass(frozen=True, slots=True)
class Limits:
    ttft_s: float
    tbt_s: float


@dataclass(frozen=True, slots=True)
class LimitedRates:
    """The highest rates in requests per second: within the limit on TTFT alone, and within both
    limits."""

    by_ttft: float
    by_both: float


Capacities = dict[str, dict[str, LimitedRates]]  # by data set and cluster


@dataclass(frozen=True, slots=True)
class Claim:
    """The claim of v3 for one data set: the gain of 3P+1D over vLLM, and the rates in its
    figure."""

    data: DataSet
    gain: float
    at_least: bool
    rates: tuple[float, ...]


def measure(
    options: Options, claims: Sequence[Claim], peers: Sequence[str] = (VLLM,)
) -> tuple[Capacities, list[str]]:
    """Returns the capacities of Mooncake's clusters and of `peers`, and the sources of the
    workloads."""
    found: Capacities = {}
    origins = []
    count = V3_QUICK_REQUESTS if options.quick else V3_REQUESTS
    for claim in claims:
        workload = claim.data.draw(count, options.seed)
        origins.append(workload.origin)
        limits = _limits(options, workload)
        found[claim.data.name] = {
            name: _capacity(options, workload, name, limits)
            for name in (MOONCAKE, BALANCED, *peers)
        }
    return found, origins


def claim_rows(found: Capacities, claims: Sequence[Claim], peer: str = VLLM) -> list[FindingRow]:
    """Returns, for each claim, the capacities and the ratio of 3P+1D's to `peer`'s by TTFT, with
    what the figures say about it."""
    rows = []
    for claim in claims:
        by = found[claim.data.name]
        name = claim.data.name
        ours = by[MOONCAKE].by_ttft / by[peer].by_ttft
        least = "at least; " if claim.at_least else ""
        text = f"{least}by TTFT, which is what the figure's claim rests on"
        rows.append(FindingRow(f"{name}: 3P+1D over vLLM", "x", 1 + claim.gain, ours, text))
        shown = [_shown(by[each].by_ttft, claim.rates) for each in (MOONCAKE, peer)]
        if all(shown):
            on_grid = f"{name}: the same, on the rates that the figure shows"
            text = f"{shown[0]:g} over {shown[1]:g} requests a second"
            rows.append(FindingRow(on_grid, "x", 1 + claim.gain, shown[0] / shown[1], text))
        both = by[MOONCAKE].by_both / by[peer].by_both
        rows.append(FindingRow(f"{name}: the same within both limits", "x", None, both))
        if peer != VLLM and VLLM in by:
            batched = by[MOONCAKE].by_both / by[VLLM].by_both
            label = f"{name}: the same over vLLM with batches"
            rows.append(FindingRow(label, "x", None, batched))
        balanced = by[BALANCED].by_both / by[peer].by_both
        rows.append(FindingRow(f"{name}: 2P+2D over vLLM, both limits", "x", None, balanced))
        for each, capacity in by.items():
            label = f"{name}, {each}: within both limits"
            note = f"TTFT alone: {capacity.by_ttft:.3g}"
            rows.append(FindingRow(label, "req/s", None, capacity.by_both, note))
    return rows


def panel(found: Mapping[str, Mapping[str, LimitedRates]], title: str) -> Panel:
    series = tuple(
        bars(each, "ours", {data: by[each].by_both for data, by in found.items()})
        for each in next(iter(found.values()))
    )
    return Panel(title, "", "requests a second within both limits", series)


def _overrides(name: str) -> Overrides:
    if name in (VLLM, ONE_BY_ONE):
        overrides = system("vLLM", NODES)
        if name == ONE_BY_ONE:
            overrides["engine"]["max_sequences"] = 1
        return overrides
    prefill = 3 if name == MOONCAKE else 2
    return cluster(prefill, NODES - prefill)


def _p90(workload: MooncakeWorkload, name: str, rate: float, seed: int) -> tuple[float, float]:
    """Returns the P90 of TTFT and TBT over all requests. A request that timed out counts as later
    than any limit."""
    found = serve(workload, _overrides(name), seed, rate).simulation.collector
    share = 0.9 * found.num_requests / max(found.num_completed, 1)
    if share > 1.0:
        return float("inf"), float("inf")
    return found.ttft_s.quantile(share), found.tbt_top10_mean_s.quantile(share)


def _limits(options: Options, workload: MooncakeWorkload) -> Limits:
    ttft_s, tbt_s = _p90(workload, MOONCAKE, V3_RATES[0], options.seed)
    return Limits(TTFT_TIMES * ttft_s, TBT_TIMES * tbt_s)


def _capacity(
    options: Options, workload: MooncakeWorkload, name: str, limits: Limits
) -> LimitedRates:
    known: dict[float, tuple[float, float]] = {}

    def p90(rate: float) -> tuple[float, float]:
        if rate not in known:
            options.progress(f"{workload.name}, {name}, {rate:.3g} requests a second")
            known[rate] = _p90(workload, name, rate, options.seed)
        return known[rate]

    def highest(tbt_s: float) -> float:
        low, high = 0, len(V3_RATES) - 1
        while low < high:
            middle = (low + high + 1) // 2
            found = p90(V3_RATES[middle])
            if found[0] <= limits.ttft_s and found[1] <= tbt_s:
                low = middle
            else:
                high = middle - 1
        return V3_RATES[low]

    return LimitedRates(highest(float("inf")), highest(limits.tbt_s))


def _shown(capacity: float, rates: Sequence[float]) -> float:
    """Returns the highest rate in the figure that is within the capacity, or 0 if none is."""
    return max((rate for rate in rates if rate <= capacity), default=0.0)
