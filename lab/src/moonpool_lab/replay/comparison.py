"""Compares the figures of `simulate --json` with those of `replay --json`, and judges them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any

from moonpool.types import Struct

LATENCY_LIMIT = 0.15
REJECTION_LIMIT = 0.10
JUDGED = ("mean", "p90")
"""Statistics that must agree within the limit; all others are only shown."""
FEW = 5
"""Largest difference of rejections that counts as chance."""


class ComparisonRow(Struct, frozen=True):
    """One figure of both the simulation and the live run. `difference` is relative to the live
    figure; `passes` is None if the figure is not judged."""

    name: str
    simulated: float
    live: float
    difference: float
    passes: bool | None = None


class Comparison(Struct, frozen=True):
    rows: tuple[ComparisonRow, ...]

    @property
    def passes(self) -> bool:
        return all(row.passes is not False for row in self.rows)

    def lines(self) -> Iterator[str]:
        """Yields a table as text."""
        yield f"{'':<24} {'simulated':>11} {'live':>11} {'difference':>11}"
        for row in self.rows:
            verdict = {True: "  within", False: "  TOO FAR", None: ""}[row.passes]
            yield (
                f"{row.name:<24} {row.simulated:>11.4g} {row.live:>11.4g}"
                f" {row.difference:>+11.1%}{verdict}"
            )


def compare(simulated: Mapping[str, Any], live: Mapping[str, Any]) -> Comparison:
    """Compares two sets of figures. Raises KeyError where figures are missing."""
    rows: list[ComparisonRow] = []
    for name, key in (("TTFT", "ttft_s"), ("TBT", "tbt_s"), ("TBT top 10 %", "tbt_top10_mean_s")):
        for part in ("mean", "p50", "p90", "p99"):
            judged = key != "tbt_top10_mean_s" and part in JUDGED
            one, other = simulated[key][part], live[key][part]
            difference = _relative(one, other)
            passes = abs(difference) <= LATENCY_LIMIT if judged else None
            rows.append(ComparisonRow(f"{name} {part} s", one, other, difference, passes))
    rows.append(_rejections(simulated, live))
    for name, path in (
        ("requests", ("requests",)),
        ("effective", ("effective",)),
        ("goodput requests/s", ("goodput_rps",)),
        ("hit ratio", ("cache", "hit_ratio")),
        ("prefill s a request", ("prefill_compute_s", "mean")),
        ("wasted prefill s", ("wasted_prefill_s",)),
    ):
        one, other = _at(simulated, path), _at(live, path)
        rows.append(ComparisonRow(name, one, other, _relative(one, other)))
    for role in sorted(set(simulated["utilisation"]) & set(live.get("utilisation", {}))):
        one, other = simulated["utilisation"][role], live["utilisation"][role]
        rows.append(ComparisonRow(f"{role} busy", one, other, _relative(one, other)))
    return Comparison(tuple(rows))


def averaged(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the means over all runs of the numbers that all runs have."""
    found: dict[str, Any] = {}
    for name, first in runs[0].items():
        values = [run[name] for run in runs if name in run]
        if isinstance(first, Mapping):
            found[name] = averaged(values) if len(values) == len(runs) else first
        elif isinstance(first, int | float) and len(values) == len(runs):
            found[name] = first if len(runs) == 1 else fmean(values)
        else:
            found[name] = first
    return found


def chance_words(lives: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Says by how much live runs of the same requests differ by chance."""
    if len(lives) < 2:
        return
    parts = []
    for name, key in (("TTFT", "ttft_s"), ("TBT", "tbt_s")):
        for part in JUDGED:
            values = [live[key][part] for live in lives]
            apart = (max(values) - min(values)) / (fmean(values) or 1.0)
            parts.append(f"{name} {part} {apart:.1%}")
    yield f"the {len(lives)} live runs are apart by {', '.join(parts)}"


def _rejections(simulated: Mapping[str, Any], live: Mapping[str, Any]) -> ComparisonRow:
    """Rejections pass within a tenth of each other, or if the difference is chance."""
    one, other = simulated["rejected"], live["rejected"]
    difference = _relative(one, other)
    passes = abs(difference) <= REJECTION_LIMIT or abs(one - other) <= FEW
    return ComparisonRow("rejected", one, other, difference, passes)


def _relative(one: float, other: float) -> float:
    if one == other:
        return 0.0
    return (one - other) / abs(other) if other else float("inf")


def _at(figures: Mapping[str, Any], path: tuple[str, ...]) -> float:
    found: Any = figures
    for name in path:
        found = found[name]
    return float(found)
