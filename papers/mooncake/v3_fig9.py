"""v3's Fig. 9: the loads of both pools under early rejection swing against each other; looking
ahead damps it."""

from __future__ import annotations

from statistics import correlation, fmean, pstdev
from typing import NamedTuple

from moonpool.config.tables import Admission
from papers.constants import (
    FLUCTUATION_DECODE,
    FLUCTUATION_PREFILL,
    FLUCTUATION_SPEED,
)
from papers.finding import Check, Finding, FindingRow
from papers.mooncake.runs import ClusterRun, cluster, serve
from papers.mooncake.workload import read_workload
from papers.options import Options
from papers.plot import Panel, PlotSeries

ADMISSIONS: dict[str, Admission] = {"early rejection": "early", "with prediction": "predictive"}
STEADY = (0.15, 0.95)
"""The steady part of the time in which requests arrive. The rest fills and drains the cluster."""


class LoadSwing(NamedTuple):
    """How the loads of both pools swing over time. At a load of 1 a pool is at its limit."""

    prefill_mean: float
    prefill_sd: float
    decode_mean: float
    decode_sd: float
    together: float  # correlation at the same instant


PAPER = LoadSwing(0.54, 0.26, 0.63, 0.14, -0.52)
NOTES = (
    (
        "The paper's figure is of production, under early rejection, and has no counterpart with"
        " prediction: that the swing is damped then is its text's claim."
    ),
    (
        "A decode step takes 26 ms even for one answer, so the decode load moves between .9 and 1"
        " here; the swing shows in the prefill pool, whose queue fills while decode admits and"
        " empties while it does not."
    ),
)


def run(options: Options) -> Finding:
    workload = read_workload(options, "conversation")
    found: dict[str, ClusterRun] = {}
    for name, admission in ADMISSIONS.items():
        options.progress(name)
        overrides = cluster(FLUCTUATION_PREFILL, FLUCTUATION_DECODE, admission=admission)
        found[name] = serve(workload, overrides, options.seed, FLUCTUATION_SPEED)
    swings = {name: _swing(served) for name, served in found.items()}
    return Finding(
        name="mooncake-v3-fig9",
        title="Loads that swing against each other",
        source="Mooncake arXiv v3, Fig. 9 and section 7.3",
        paper_inputs=("20 machines, TTFT <= 30 s, TBT <= 0.1 s; 20 minutes of production",),
        chosen_inputs=(
            workload.origin,
            (
                f"{FLUCTUATION_PREFILL} prefill and {FLUCTUATION_DECODE} decode nodes, replayed at"
                f" {FLUCTUATION_SPEED:g} x: both pools are offered a fifth more than they can do"
            ),
        ),
        rows=_rows(swings),
        checks=_checks(swings),
        notes=NOTES,
        panels=tuple(_panel(name, served) for name, served in found.items()),
    )


def _series(served: ClusterRun, name: str) -> list[tuple[float, float]]:
    end_s = served.simulation.last_arrival_s
    begin_s, end_s = STEADY[0] * end_s, STEADY[1] * end_s
    return [(t, v) for t, v in served.simulation.timeline.series(name) if begin_s <= t <= end_s]


def _swing(served: ClusterRun) -> LoadSwing:
    prefill = [load for _, load in _series(served, "prefill_load")]
    decode = [load for _, load in _series(served, "decode_load")]
    together = 0.0
    if len(prefill) > 1 and pstdev(prefill) and pstdev(decode):
        together = correlation(prefill, decode)
    if not prefill:
        return LoadSwing(0.0, 0.0, 0.0, 0.0, 0.0)
    return LoadSwing(fmean(prefill), pstdev(prefill), fmean(decode), pstdev(decode), together)


def _rows(swings: dict[str, LoadSwing]) -> tuple[FindingRow, ...]:
    labels = {
        "prefill_mean": ("prefill load: mean", _RATE),
        "prefill_sd": ("prefill load: deviation", ""),
        "decode_mean": ("decode load: mean", _RATE),
        "decode_sd": ("decode load: deviation", "a step of one answer is a quarter of the limit"),
        "together": ("correlation of the two loads", ""),
    }
    rows = []
    for name, swing in swings.items():
        for field, (label, note) in labels.items():
            paper = getattr(PAPER, field) if name == "early rejection" else None
            rows.append(FindingRow(f"{name}: {label}", "", paper, getattr(swing, field), note))
    return tuple(rows)


_RATE = "hangs on the rate offered, which the paper does not print"


def _checks(swings: dict[str, LoadSwing]) -> tuple[Check, ...]:
    early, predicted = swings["early rejection"], swings["with prediction"]
    return (
        Check("under early rejection the loads move against each other", early.together < -0.3),
        Check(
            "prediction damps it: the prefill load deviates by a third less or more",
            predicted.prefill_sd < early.prefill_sd * 2 / 3,
        ),
        Check("and the loads no longer oppose each other as much",
              predicted.together > early.together + 0.2),
    )  # fmt: skip


def _panel(name: str, served: ClusterRun) -> Panel:
    series = []
    for label, column in (("prefill pool", "prefill_load"), ("decode pool", "decode_load")):
        points = _series(served, column)
        at, loads = tuple(t for t, _ in points), tuple(load for _, load in points)
        series.append(PlotSeries(label, "ours", "line", at, loads))
    title = f"{name[0].upper()}{name[1:]}"
    limits = (0.0, 1.05)
    return Panel(title, "time (s)", "load (1 = its limit)", tuple(series), y_limits=limits)
