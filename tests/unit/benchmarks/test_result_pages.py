"""Tests the pages of forecasts and of wrong answers, made from fixed rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import forecasts_page, wrong_answers_page
from moonpool_lab.forecast.errors import forecast_errors
from moonpool_lab.forecast.forecast_table import TableError, add_entry, read_table

ORIGIN = {"command": "moonpool x", "version": "0.1.0", "commit": "abc", "machine": "m"}


def figures(ttft_s: float) -> dict[str, Any]:
    times = {"p50": ttft_s, "p90": 2 * ttft_s, "p99": 3 * ttft_s}
    return {"requests": 10, "completed": 10, "rejected": 0, "effective": 9, "hit_ratio": 0.5} | {
        "effective_share": 0.9,
        "ttft_s": times,
        "tbt_s": times,
    }


def table(path: Path, *, outcome: bool) -> Path:
    forecast = {
        "kind": "forecast",
        "written": "2026-01-01T00:00:00+00:00",
        "title": "a server",
        "slo": {"ttft_s": 1.0, "tbt_s": 0.1},
        "trace": {"trace": "t.jsonl", "trace_sha256": "12", "scale_tokens": "1"},
        "capacity_rps": 3.0,
        "measured": {"drift": 2.0},
        "loads": [{"load": 0.5, "speed": 1.0, "rows": 10, "figures": figures(0.11)}],
        "origin": ORIGIN,
    }
    made = add_entry(path, forecast)
    if outcome:
        errors = forecast_errors(figures(0.11), figures(0.1))
        came = {"kind": "outcome", "forecast": made, "load": 0.5, "figures": figures(0.1)}
        add_entry(path, came | {"errors": errors})
    return path


def test_a_forecast_stands_beside_what_came(tmp_path: Path) -> None:
    page = forecasts_page.current(table(tmp_path / "t.jsonl", outcome=True))
    assert "1 loads tried: median error of latencies 10.0%, worst of a P99 10%;" in page
    assert "; median error of effective requests 0.0%." in page
    assert "| a server | 2026-01-01 | 10% | +0.0% |" in page
    assert "**Not steady**: a prompt took 2 times as long" in page
    assert "| 0.5 | forecast | 0.11 s | 0.22 s | 0.33 s |" in page
    assert "|  | measured | 0.1 s | 0.2 s | 0.3 s |" in page
    assert "|  | error | +10% | +10% | +10% |" in page


def test_a_forecast_that_was_not_tried_stays(tmp_path: Path) -> None:
    page = forecasts_page.current(table(tmp_path / "t.jsonl", outcome=False))
    assert "No forecast has been tried yet." in page and "| not tried |" in page


def test_a_changed_table_makes_no_page(tmp_path: Path) -> None:
    path = table(tmp_path / "t.jsonl", outcome=True)
    path.write_text(path.read_text().replace("0.11", "0.10"))
    with pytest.raises(TableError, match=r"line 1 of t\.jsonl"):
        forecasts_page.current(path)


def test_the_pages_are_what_the_rows_give() -> None:
    again = "run `python -m benchmarks.forecasts_page`"
    assert forecasts_page.current() == forecasts_page.PAGE.read_text(), again
    again = "run `python -m benchmarks.wrong_answers_page`"
    made = wrong_answers_page.page(wrong_answers_page.read_rows())
    assert made == wrong_answers_page.PAGE.read_text(), again
    if forecasts_page.TABLE.exists():
        assert read_table(forecasts_page.TABLE)


def phase(**kinds: int) -> dict[str, Any]:
    return {
        "answered": sum(kinds.values()),
        "kinds": kinds,
        "foreign": 1,
        "facts": 4,
        "facts_lost": 2,
        "failed": {"cut": 3, "refused": 5},
    }


def test_a_trial_becomes_a_row_of_its_own_file(tmp_path: Path) -> None:
    figures = {"model": "m", "quiet": phase(right=5), "load": phase(right=3, wrong=2, near_tie=1)}
    trial = tmp_path / "trial.json"
    server = figures | {"proven": ["2 answers that no near-tie explains"], "examples": ["long"]}
    trial.write_text(json.dumps({"servers": [server], "origin": ORIGIN}))
    rows = tmp_path / "rows"
    (path,) = wrong_answers_page.add(trial, "vLLM with a store", "0.32.0", rows)
    assert path.name == "vllm-with-a-store-0.32.0-m.json"
    assert "examples" not in json.loads(path.read_text())
    page = wrong_answers_page.page(wrong_answers_page.read_rows(rows))
    row = "| vLLM with a store | 0.32.0 | m | 11 | 2 | 1 | 0 | 2 | 2 of 4 | 6 |"
    assert row in page and "moonpool 0.1.0, abc |" in page


def test_a_row_that_lacks_something_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"system": "x"}')
    with pytest.raises(ValueError, match=r"bad.json has no version, origin"):
        wrong_answers_page.read_rows(tmp_path)
