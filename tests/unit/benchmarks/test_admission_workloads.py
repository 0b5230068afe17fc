"""Tests that `bench admission-workloads` makes draws that anyone can repeat, and computes their
figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite.cluster.admission_workloads import (
    AdmissionDraw,
    arrive_by,
    draw_workload,
    loss,
    scarcest_work_s,
    summarise,
)
from moonpool.sim.workload import make_arrivals
from moonpool.trace.reader import open_trace
from moonpool.trace.row import TraceRow
from moonpool_lab.oracle.cluster import limits_of
from tests.cli_runner import succeed


def test_a_number_stands_for_one_workload() -> None:
    first, again = (draw_workload(AdmissionDraw(5, 3, 60)) for _ in range(2))
    other = draw_workload(AdmissionDraw(5, 4, 60))
    assert (first.rows, first.words, first.config) == (again.rows, again.words, again.config)
    assert other.words != first.words


def test_arrivals_follow_the_pattern_in_their_order() -> None:
    rows = [TraceRow(float(second), second + 1, 1) for second in range(1001)]
    found = arrive_by(rows, [1.8, 0.2], 10.0)
    assert [row.input_tokens for row in found] == [row.input_tokens for row in rows]
    times = [row.arrived_s for row in found]
    assert times == sorted(times) and (times[0], times[-1]) == (0.0, 10.0)
    assert sum(at_s < 5.0 for at_s in times) == pytest.approx(900, abs=2)


def test_the_load_is_the_least_work_over_the_time() -> None:
    found = [draw_workload(AdmissionDraw(1, number, 40)) for number in range(6)]
    for workload in found:
        config, hardware, words = workload.config, workload.hardware, workload.words
        sizes = (workload.block_tokens, config.pool.block_tokens, hardware.largest_request_tokens)
        arrivals = list(make_arrivals(workload.rows, *sizes))
        work_s = scarcest_work_s(*limits_of(config, hardware, arrivals))
        last_s = workload.rows[-1].arrived_s
        assert 0.3 <= words["load"] <= 4.0
        assert words["load"] * last_s == pytest.approx(work_s, rel=0.02)
    assert len({workload.words["cluster"] for workload in found}) > 2


@pytest.mark.long
def test_figures_are_those_of_simulate(tmp_path: Path) -> None:
    """`moonpool simulate` with the kept trace and a row's flags must give the row's figures."""
    figures = tmp_path / "figures.json"
    kept = ("--keep", str(tmp_path), "--json", str(figures))
    command = ("bench", "admission-workloads", "--draws", "2", "--requests", "60", "--seed", "8")
    text = succeed(*command, "--processes", "1", *kept).output
    found: dict[str, Any] = json.loads(figures.read_text())
    assert len(found["rows"]) == found["summary"]["rows"] == 2
    for row in found["rows"]:
        assert row["workload"] in text
        one = tmp_path / "one.json"
        trace = ("--trace", str(tmp_path / f"8-{row['number']}.jsonl"), *row["flags"].split())
        for policy in ("baseline", "goodput"):
            succeed("simulate", *trace, "--admission", policy, "--json", str(one))
            assert json.loads(one.read_text())["effective"] == row["effective"][policy]


def test_recorded_traces_are_used_where_given(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    flags = ("--profile", "hot-set", "--requests", "90", "--seed", "2", "-o", str(path))
    succeed("trace", "generate", *flags)
    lengths = [(row.input_tokens, row.output_tokens) for row in open_trace(str(path))]
    used = [draw_workload(AdmissionDraw(1, number, 30, (str(path),))) for number in range(3)]
    assert [workload.words["workload"].startswith("mine from") for workload in used] == [
        True,
        False,
        False,
    ]
    start = int(used[0].words["workload"].split()[-1])
    part = [(row.input_tokens, row.output_tokens) for row in used[0].rows]
    assert part == lengths[start : start + 30]


def test_the_summary_counts_what_goodput_loses() -> None:
    others = {"none": 50, "early": 90, "predictive": 80}
    rows = [
        {"effective": {**others, "baseline": 100, "goodput": 95}},
        {"effective": {**others, "baseline": 100, "goodput": 120}},
        {"effective": {**others, "baseline": 1000, "goodput": 995}},
    ]
    assert loss(rows[0]["effective"]) == pytest.approx(0.05)
    found = summarise(rows)
    assert (found["lost_rows"], found["worst_loss"]) == (1, 0.05)
    assert (found["sum"]["goodput"], found["sum_of_best_others"]) == (1210, 1200)
