"""Tests `moonpool bench capacity` as a user sees it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moonpool.plan.confidence import Attainment
from moonpool.trace.builtin import BUILT_IN
from moonpool.trace.generate import generate
from moonpool.trace.jsonl import write_trace
from moonpool.trace.row import TraceRow
from moonpool_lab.profiling.capacity import LiveCapacity
from tests.cli_runner import invoke, refusal, succeed


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("trace") / "t.jsonl"
    write_trace(generate(BUILT_IN["conversation"], num_requests=150, seed=1), path)
    return str(path)


@pytest.mark.long
def test_it_finds_a_rate_and_says_how_sure_it_is(trace: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    small = ("--prefill", "1", "--decode", "1", "--slo-ttft", "10")
    limits = ("--seeds", "3", "--tolerance", "0.2", "--processes", "1", "--json", path)
    done = succeed("bench", "capacity", "--trace", trace, *small, *limits)
    assert "requests/s (speed" in done.output and "95% confidence" in done.output
    found = json.loads(path.read_bytes())
    capacity = found["capacity"]
    assert 0 < capacity["holds"] < capacity["fails"]
    assert capacity["holds_rps"] == pytest.approx(capacity["holds"] * found["trace_rps"])
    for point in capacity["points"]:
        assert 2 <= len(point["runs"]) <= 3
        if point["verdict"] == "meets":
            assert point["interval"]["low"] >= 0.9
        if point["rate"] <= capacity["holds"]:
            assert point["verdict"] != "misses"
    assert found["config"]["cluster"]["prefill"] == 1 and found["origin"]["command"]


def test_what_cannot_run_is_one_line(trace: str) -> None:
    done = invoke("bench", "capacity", "--trace", trace, "--kv-tokens", "1024", "--processes", "1")
    assert done.exit_code == 1 and "no instance holds more than" in done.stderr
    refusal("bench", "capacity", "--trace", "nowhere.jsonl")


def test_requests_that_a_server_does_not_take_are_not_in_the_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [TraceRow(float(n), 2000 if n % 2 else 50, 10, ()) for n in range(9)]
    write_trace(rows, tmp_path / "t.jsonl")

    async def facts(live: LiveCapacity) -> Any:
        return SimpleNamespace(max_model_tokens=1000)

    def kept(live: LiveCapacity, speed: float, seed: int) -> Attainment:
        return Attainment(5, 5 if speed <= 2.0 else 0)

    monkeypatch.setattr(LiveCapacity, "_query", facts)
    monkeypatch.setattr(LiveCapacity, "measure", kept)
    path = tmp_path / "c.json"
    wanted = ("--trace", tmp_path / "t.jsonl", "--url", "http://h:1", "--json", path)
    done = succeed("bench", "capacity", *wanted)
    assert "left out: 4 of 9 requests" in done.output
    found = json.loads(path.read_bytes())
    assert found["trace_rps"] == 5 / 8
    assert found["capacity"]["holds_rps"] == found["capacity"]["holds"] * 5 / 8


def test_a_server_that_is_not_there_is_one_line() -> None:
    said = refusal("bench", "capacity", "--url", "http://127.0.0.1:1")
    assert said.startswith("moonpool: no server answers at http://127.0.0.1:1")
    assert "moonpool serve" in said
