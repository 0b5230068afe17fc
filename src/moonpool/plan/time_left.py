"""Estimates how many simulations a search will still run, to show the time left."""

from __future__ import annotations

from collections.abc import Mapping

USUAL_RUNS = {
    "starting": 4.0,
    "policies": 2.0,
    "improving": 8.0,
    "settling": 6.0,
    "clusters at the same price": 5.0,
    "draws of the trace": 6.0,
    "a sure choice": 4.0,
    "neighbours": 6.0,
}
"""The stages of a search in order, and how many runs each usually takes."""


class TimeLeft:
    """Estimates the runs left. Each stage counts with its usual runs; a stage that takes longer
    always counts with one more run."""

    def __init__(self, usual_runs: Mapping[str, float] = USUAL_RUNS) -> None:
        self._usual = usual_runs
        self._stages = list(usual_runs)
        self._stage = 0
        self._began_runs = 0.0

    def begin(self, stage: str, runs: float) -> None:
        """Notes that a stage begins after this many runs."""
        if stage in self._stages and self._stages.index(stage) != self._stage:
            self._stage, self._began_runs = self._stages.index(stage), runs

    def runs(self, runs: float) -> float:
        """Returns the estimated runs left after this many runs."""
        own = self._usual[self._stages[self._stage]]
        later = sum(self._usual[stage] for stage in self._stages[self._stage + 1 :])
        return max(own - (runs - self._began_runs), 1.0) + later

    def seconds(self, runs: float, used_s: float) -> float | None:
        """Returns the seconds left if each run takes as long as the mean run so far, or None before
        the first run has ended."""
        return self.runs(runs) * used_s / runs if runs else None


def time_words(seconds: float | None) -> str:
    """Returns words such as "about 3 min left", or "" if `seconds` is None."""
    if seconds is None:
        return ""
    if seconds < 60:
        return f"about {max(round(seconds / 5) * 5, 5)} s left"
    minutes = seconds / 60
    return f"about {minutes:.0f} min left" if minutes < 90 else f"about {minutes / 60:.1f} h left"


def share_done(used_s: float, left_s: float | None) -> float:
    """Returns the share of the whole time that is over, from 0 to 1, or 0 if the time left is
    unknown."""
    return 0.0 if left_s is None else used_s / max(used_s + left_s, 1e-9)
