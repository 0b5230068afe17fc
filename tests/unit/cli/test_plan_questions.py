"""Tests what `plan` asks for on a terminal, and what it prints elsewhere; its page and its
tables."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from click.testing import Result

from moonpool.trace.jsonl import write_trace
from moonpool.trace.row import TraceRow
from tests.cli_runner import invoke


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "t.jsonl"
    write_trace([TraceRow(2.0 * i, 2048, 8) for i in range(20)], path)
    return str(path)


def plan(*arguments: str, typed: str | None = None) -> Result:
    line = ["plan", *arguments, "--runs", "3", "--processes", "1"]
    return invoke(*line, input=typed)


def test_a_terminal_is_asked_for_model_levels_devices_and_prices(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool.cli.plan.on_terminal", lambda: True)
    file = tmp_path / "p.json"
    done = plan(
        "--trace", trace, "--json", str(file), typed="llama3-8b\n5\n0.2\nH100-SXM:4\n2.25\n"
    )
    assert done.exit_code == 0, done.output
    found = json.loads(file.read_bytes())
    assert (found["slo"]["ttft_s"], found["slo"]["tbt_s"]) == (5.0, 0.2)
    assert found["run"]["devices"] == "H100-SXM:4"
    assert found["prices"]["devices"]["H100-SXM"]["usd_per_h"] == 2.25
    assert "H100-SXM costs 2.25 USD/h (your answer)" in done.stdout
    assert "An instance is one copy of llama3-8b;" in " ".join(done.stdout.split())
    assert "deepseek-v3" in done.stderr, "the models are named before the question"
    given = ("--shape", "llama3-8b", "--slo-ttft", "5", "--slo-tbt", "1", "--devices", "H100-SXM:4")
    done = plan("--trace", trace, *given, typed="\n")
    assert done.exit_code == 0 and "TTFT)" not in done.stderr.partition("USD per hour")[0]
    assert "USD per hour of one H100-SXM" in done.stderr


def test_elsewhere_one_line_says_what_was_taken(trace: str, tmp_path: Path) -> None:
    said = plan("--trace", trace, "--slo-tbt", "0.2").stderr.splitlines()[0]
    assert said.startswith(
        "not given, so taken: --shape llama3-70b, --slo-ttft 30, --devices A800-SXM:8, and the"
    )
    assert "nodes of 8 A800-SXM, those of Mooncake's paper" in said
    config = tmp_path / "c.toml"
    config.write_text('[slo]\nttft_s = 5.0\ntbt_s = 0.2\n[hardware]\nshape = "llama3-8b"\n')
    done = plan("--trace", trace, "--config", str(config), "--devices", "H100-SXM:4")
    assert "not given" not in done.stderr and "TTFT, time to first token" in done.stdout


def test_page_and_table_are_written(trace: str, tmp_path: Path) -> None:
    page, table = tmp_path / "p.html", tmp_path / "runs.csv"
    done = plan("--trace", trace, "--page", str(page), "--table", str(table))
    assert done.exit_code == 0, done.output
    assert f"written: {page}" in done.stdout and "about " in done.stderr
    assert page.read_text().startswith("<!DOCTYPE html>")
    rows = list(csv.DictReader(table.open()))
    assert {"usd_per_h", "share", "load", "ttft_p90_s"} <= rows[0].keys()
    done = plan("--trace", trace, "--table", str(tmp_path / "runs.xlsx"))
    assert done.exit_code == 1 and "must end in .csv or .parquet" in done.output


def test_parquet_needs_its_package(
    trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moonpool.cli.plan.find_spec", lambda name: None)
    done = plan("--trace", trace, "--table", str(tmp_path / "runs.parquet"))
    assert done.exit_code == 1 and "needs pyarrow (pip install pyarrow)" in done.output
