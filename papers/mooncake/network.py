"""FAST'25 Fig. 13: mean TTFT by the nodes' network, and what congestion adds to a fetch."""

from __future__ import annotations

from typing import NamedTuple

from papers.constants import MOONCAKE_DECODE, MOONCAKE_PREFILL
from papers.finding import Check, Finding, FindingRow
from papers.mooncake.runs import Overrides, cluster, serve, speed_with
from papers.mooncake.workload import MooncakeWorkload, find_workload
from papers.options import Options
from papers.plot import Panel, PlotSeries

PAPER_TTFT_S = {24: 5.09, 40: 2.40, 80: 1.73, 100: 1.60, 160: 1.41, 320: 1.25, 400: 1.25}
PAPER_RECOMPUTE_S = 2.62
PAPER_TRANSFER = {24: (3.65, 1.54), 100: (0.403, 0.383)}  # real, ideal, s
BYTES_PER_GBIT = 1e9 / 8


class BandwidthPoint(NamedTuple):
    ttft_s: float
    real_s: float  # mean, of a fetch
    ideal_s: float  # its bytes at the bandwidth
    fetches: int


def run(options: Options) -> Finding:
    workload = find_workload(options, "synthetic")

    def anew_s(speed: float) -> float:
        none: Overrides = cluster(MOONCAKE_PREFILL, MOONCAKE_DECODE)
        none["pool"] = {"prefix_caching": False}
        fastest = max(PAPER_TTFT_S) * BYTES_PER_GBIT
        return serve(workload, none, options.seed, speed, nic_bytes_per_s=fastest).ttft_s

    speed = speed_with(options, anew_s, PAPER_RECOMPUTE_S)
    recompute_s = anew_s(speed)
    found = {gbits: _at(options, workload, gbits, speed) for gbits in PAPER_TTFT_S}
    rate = speed * len(workload.rows) / max(workload.rows[-1].arrived_s, 1e-9)
    return Finding(
        name="mooncake-network",
        title="Network bandwidth",
        source="Mooncake, FAST'25 Fig. 13",
        paper_inputs=("bandwidths of a node's network, 24 to 400 Gb/s",),
        chosen_inputs=(
            workload.origin,
            (
                "the trace is not named beside the figure; its ideal transfer times are those of "
                "14 to 15 thousand tokens, the mean prompt of the synthetic trace, and its 1.25 s "
                "is near the 1.19 s of Fig. 15 for 8P+8D"
            ),
            f"{MOONCAKE_PREFILL} prefill and {MOONCAKE_DECODE} decode nodes",
            (
                "the rate is not printed: it is the one at which computing everything anew has "
                f"the figure's mean TTFT of {PAPER_RECOMPUTE_S} s, {rate:.2f} requests a second, "
                f"{speed:.2f} x the trace's"
            ),
            "the Conductor knows the bandwidth; it fetches only where it expects to gain",
        ),
        rows=_rows(found, recompute_s),
        checks=_checks(found, recompute_s),
        notes=NOTES,
        panels=(_ttft_panel(found, recompute_s), _transfer_panel(found)),
    )


NOTES = (
    (
        "The paper's TTFT less its real transfer time is 1.4 s at 24 Gb/s and 1.2 s at 100: each "
        "request waits for a transfer of about its whole prompt. Ours sends the decode node only "
        "what it lacks, while it is computed."
    ),
    (
        "On a slow network the paper's Conductor fetches all the same: Algorithm 1 as printed does "
        "not weigh a transfer against the computation that it saves. Ours does, and sends requests "
        "to where their prefix is, so that there are few fetches at any bandwidth: 24 Gb/s cost it "
        "little, and computing anew is never the better way."
    ),
)


def _at(options: Options, workload: MooncakeWorkload, gbits: int, speed: float) -> BandwidthPoint:
    options.progress(f"{gbits} Gb/s")
    bytes_per_s = gbits * BYTES_PER_GBIT
    overrides = cluster(MOONCAKE_PREFILL, MOONCAKE_DECODE)
    served = serve(workload, overrides, options.seed, speed, nic_bytes_per_s=bytes_per_s)
    figures = [node.messenger.figures for node in served.simulation.nodes.values()]
    fetches = sum(f.num_fetches for f in figures)
    num_bytes = sum(f.fetched_bytes for f in figures)
    seconds = sum(f.fetching_s for f in figures)
    per = max(fetches, 1)
    return BandwidthPoint(
        served.ttft_s,
        seconds / per,
        num_bytes / bytes_per_s / per,
        fetches,
    )


def _rows(found: dict[int, BandwidthPoint], recompute_s: float) -> tuple[FindingRow, ...]:
    rows = [
        FindingRow(
            f"{gbits} Gb/s: mean TTFT",
            "s",
            PAPER_TTFT_S[gbits],
            point.ttft_s,
            f"{point.fetches:,} fetches",
        )
        for gbits, point in found.items()
    ]
    rows.append(
        FindingRow(
            "nothing reused: mean TTFT",
            "s",
            PAPER_RECOMPUTE_S,
            recompute_s,
            "the rate is fitted to this",
        )
    )
    for gbits, (real_s, ideal_s) in PAPER_TRANSFER.items():
        point = found[gbits]
        if not point.fetches:
            continue
        rows.append(FindingRow(f"{gbits} Gb/s: transfer, ideal", "s", ideal_s, point.ideal_s))
        rows.append(FindingRow(f"{gbits} Gb/s: transfer, real", "s", real_s, point.real_s))
        ours = point.real_s / point.ideal_s
        rows.append(FindingRow(f"{gbits} Gb/s: real over ideal", "x", real_s / ideal_s, ours))
    return tuple(rows)


def _checks(found: dict[int, BandwidthPoint], recompute_s: float) -> tuple[Check, ...]:
    means = [found[gbits].ttft_s for gbits in sorted(found)]
    slowest, advised, fastest = found[24].ttft_s, found[100].ttft_s, found[400].ttft_s
    return (
        Check("TTFT falls as bandwidth grows", means == sorted(means, reverse=True)),
        Check("at 100 Gb/s and more, within 30 % of the best", advised <= 1.3 * fastest),
        Check("at 24 Gb/s computing anew is the faster", recompute_s < slowest),
        Check("at 100 Gb/s and more, reuse is the faster", advised < recompute_s),
    )


def _ttft_panel(found: dict[int, BandwidthPoint], recompute_s: float) -> Panel:
    at = tuple(float(gbits) for gbits in found)
    ends = (at[0], at[-1])
    return Panel(
        "Mean TTFT",
        "network of a node (Gb/s)",
        "time (s)",
        (
            PlotSeries("Mooncake", "paper", "line", at, tuple(PAPER_TTFT_S.values())),
            PlotSeries("nothing reused", "paper", "line", ends, (PAPER_RECOMPUTE_S,) * 2),
            PlotSeries("Mooncake", "ours", "line", at, tuple(p.ttft_s for p in found.values())),
            PlotSeries("nothing reused", "ours", "line", ends, (recompute_s,) * 2),
        ),
    )


def _transfer_panel(found: dict[int, BandwidthPoint]) -> Panel:
    at = tuple(float(gbits) for gbits in found)
    papers = tuple(float(gbits) for gbits in PAPER_TRANSFER)
    return Panel(
        "A transfer, mean",
        "network of a node (Gb/s)",
        "time (s)",
        (
            PlotSeries(
                "real", "paper", "points", papers, tuple(r for r, _ in PAPER_TRANSFER.values())
            ),
            PlotSeries(
                "ideal", "paper", "points", papers, tuple(i for _, i in PAPER_TRANSFER.values())
            ),
            PlotSeries("real", "ours", "line", at, tuple(p.real_s for p in found.values())),
            PlotSeries("ideal", "ours", "line", at, tuple(p.ideal_s for p in found.values())),
        ),
        log_y=True,
    )
