"""The result of an experiment: the paper's figures, ours, and a verdict for each row.

This module has frozen data only. A finding reads no file, and prints and draws nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from moonpool.distributions import rounded
from papers.plot import Panel

Verdict = Literal[
    "within 10 %", "within 25 %", "same order", "does not follow", "ours alone", "withheld"
]
CLOSE, NEAR, SAME_ORDER = 0.10, 0.25, 2.0


@dataclass(frozen=True, slots=True)
class FindingRow:
    """One figure. `paper` is None where the paper prints none. `note` says why the paper's figure
    and ours differ.

    A row of a `partial` run has no verdict, because it cannot be compared with the paper's complete
    run.
    """

    label: str
    unit: str
    paper: float | None
    ours: float
    note: str = ""
    partial: bool = False

    @property
    def difference(self) -> float | None:
        """Returns our figure's difference from the paper's, as a share of the paper's figure; None
        if they cannot be compared."""
        return None if not self.paper or self.partial else self.ours / self.paper - 1

    @property
    def verdict(self) -> Verdict:
        """The verdict, which follows from the difference; "same order" is within a factor of
        two."""
        if self.paper is None:
            return "ours alone"
        if self.partial:
            return "withheld"
        off = abs(self.ours - self.paper)
        if off <= CLOSE * abs(self.paper):
            return "within 10 %"
        if off <= NEAR * abs(self.paper):
            return "within 25 %"
        low, high = sorted((abs(self.ours), abs(self.paper)))
        if self.ours * self.paper > 0 and high <= SAME_ORDER * low:
            return "same order"
        return "does not follow"


@dataclass(frozen=True, slots=True)
class Check:
    """A claim that needs no tolerance, such as an order, and whether it holds in our results."""

    text: str
    holds: bool
    partial: bool = False


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one experiment. `paper_inputs` are stated by the paper. `chosen_inputs` are not
    stated there, so each says which value was chosen and why."""

    name: str
    title: str
    source: str
    paper_inputs: tuple[str, ...]
    chosen_inputs: tuple[str, ...]
    rows: tuple[FindingRow, ...]
    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()
    panels: tuple[Panel, ...] = ()

    def as_partial(self, reason: str) -> Finding:
        """Returns the finding of a run of a part of the workload, whose verdicts are withheld."""
        return replace(
            self,
            title=f"{self.title} ({reason}: no verdict)",
            rows=tuple(replace(row, partial=True) for row in self.rows),
            checks=tuple(replace(check, partial=True) for check in self.checks),
        )


def figures(finding: Finding) -> dict[str, Any]:
    """Returns the figures for `--json`, which are equal on every machine, byte for byte."""
    found: dict[str, Any] = msgspec.to_builtins(finding)
    found["rows"] = [
        {
            "label": row.label,
            "unit": row.unit,
            "paper": row.paper,
            "ours": rounded(row.ours),
            "difference": None if row.difference is None else rounded(row.difference),
            "verdict": row.verdict,
            "note": row.note,
        }
        for row in finding.rows
    ]
    for panel in found["panels"]:
        for series in panel["series"]:
            series["values"] = [rounded(value) for value in series["values"]]
            series["at"] = [x if isinstance(x, str) else rounded(x) for x in series["at"]]
    return found
