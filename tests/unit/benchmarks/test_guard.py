"""Tests the guard of speed: two versions run in turns, and the guard reports a loss."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import guard
from benchmarks.checkout import ROOT
from benchmarks.cli.commands import conductor
from benchmarks.guard import GuardError, compared, in_turns, measure
from moonpool.config.tables import ConductorConfig


def test_both_versions_run_in_turns_and_their_least_times_count() -> None:
    ran: list[str] = []
    times = iter([3.0, 5.0, 4.0, 2.0])

    def run(sources: Path) -> guard.Times:
        ran.append(sources.name)
        return {"a": next(times)}

    old, new = in_turns(Path("old"), Path("new"), 2, run)
    assert ran == ["old", "new", "new", "old"]
    assert (old, new) == ({"a": 2.0}, {"a": 4.0})


@pytest.mark.parametrize(("after_s", "lost"), [(1.09, False), (1.11, True), (0.5, False)])
def test_a_loss_above_a_tenth_is_told(after_s: float, lost: bool) -> None:
    lines, found = compared({"a": 1.0, "b": 1.0}, {"a": after_s, "b": 1.0}, "v0.1.0")
    assert found is lost
    assert ("more than 10% slower" in lines[1]) is lost
    assert "slower" not in lines[2]


def test_sources_without_the_package_are_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match=r"cannot be measured: [^\n]+$"):
        measure(tmp_path)


def test_the_benchmark_measures_the_default_decision() -> None:
    default = ConductorConfig()
    options = {option.name: option.default for option in conductor.params}
    assert options["admission"] == default.admission
    assert options["placement"] == default.placement


def test_the_makefile_runs_it() -> None:
    assert "-m benchmarks.guard $(COMMIT)" in (ROOT / "Makefile").read_text()
