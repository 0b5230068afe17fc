"""Runs small versions of Lamina's experiments."""

from __future__ import annotations

from pathlib import Path

import pytest

from papers.lamina.runs import CASES, fitting, run_plant
from papers.options import MissingTraceError, Options
from papers.registry import run

LENGTHS = [(3_000 + 37 * i % 900, 60 + i % 40) for i in range(400)]
LLAMA_65B = CASES[1]


def test_prices_are_the_paper_s() -> None:
    assert [round(case.lamina.usd_per_h, 2) for case in CASES] == [20.32, 40.64, 40.64]
    assert [round(case.rival.usd_per_h, 2) for case in CASES] == [22.12, 44.24, 44.24]
    assert all(case.all_memory.usd_per_h <= case.lamina.usd_per_h for case in CASES)


def test_offloading_holds_twice_the_batch_and_gives_more() -> None:
    lamina, rival = (
        run_plant(plant, LLAMA_65B.shape, LENGTHS) for plant in (LLAMA_65B.lamina, LLAMA_65B.rival)
    )
    assert 1.7 < lamina.batch / rival.batch < 2.6
    assert 1 < lamina.tokens_per_s / rival.tokens_per_s < 2
    assert lamina.tbt_s > rival.tbt_s


def test_what_does_not_fit_is_left_out_on_both_sides() -> None:
    assert fitting([(100, 10), (10_000_000, 10)], LLAMA_65B) == [(100, 10)]


def test_bandwidth() -> None:
    found = run("lamina-bandwidth", Options())
    assert [check.holds for check in found.checks] == [True, True, True]
    saved = {row.label: row.ours for row in found.rows if "queries first" in row.label}
    assert all(0 < value < 0.2 for value in saved.values()) and len(saved) == 2


def test_throughput_without_a_trace_says_which(tmp_path: Path) -> None:
    with pytest.raises(MissingTraceError, match="azure"):
        Options(folders=(tmp_path,)).find_trace("azure-conv")
