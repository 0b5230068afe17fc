"""Tests plans for odd but legal traces: each plan ends with a right answer or one clear line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from moonpool.cli.main import cli
from moonpool.config.parse import parse_config
from moonpool.plan.bounds import Bounds
from moonpool.plan.candidate import Candidate, NodeKind, Priced
from moonpool.plan.demand import demand_of, prepare, truth_for
from moonpool.plan.trial import Trial, Workload, run_trial
from moonpool.sim.defaults import DEFAULTS
from moonpool.sim.hardware.prices import parse_prices
from moonpool.trace.row import TraceRow

A800 = NodeKind("A800-SXM", 8)
BASE = truth_for(parse_config("", {}, DEFAULTS), [A800], None)
FEW = ("--devices", "A800-SXM:8", "--seeds", "2", "--runs", "12", "--processes", "1")


def planned(path: Path, *arguments: str) -> Result:
    done = CliRunner().invoke(cli, ["plan", "--trace", str(path), *FEW, *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def written(folder: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Writes the rows with a byte-order mark at their start, CRLF, and a blank line at their
    end."""
    path = folder / "trace.jsonl"
    text = "".join(json.dumps(row) + "\r\n" for row in rows)
    path.write_bytes((text + "\r\n").encode("utf-8-sig"))
    return path


def row(ms: float, prompt: float = 4000, answer: float = 20, **more: Any) -> dict[str, Any]:
    return {"timestamp": ms, "input_length": prompt, "output_length": answer, **more}


PAUSE_MS = 10 * 365 * 86_400_000
ODD = {
    "one request": [row(0)],
    "one of one token": [row(5, 1, 1)],
    "all at once": [row(0) for _ in range(20)],
    "a pause of ten years": [row(0), row(1000), row(PAUSE_MS), row(PAUSE_MS + 1000)],
    "numbers with fractions, empty rows": [row(0, 4000.0, 20.0), row(900, 0), row(2000, 5000)],
    "out of order": [row(3000), row(0), row(9000)],
    "an agent": [
        row(0, session_id="a", request_id="1"),
        {"session_id": "a", "delay": 3_600_000, "input_length": 9000.0, "output_length": 9},
    ],
}


@pytest.mark.parametrize("rows", ODD.values(), ids=ODD)
def test_an_odd_trace_has_an_answer(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    done = planned(written(tmp_path, rows), "--runs", "3")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(("Buy ", "ended early ")) and "Buy " in done.stdout
    assert "e+09" not in done.stdout, "no rate of a trace without duration"


def test_a_table_with_a_mark_and_crlf_has_an_answer(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    lines = ["timestamp,input_tokens,output_tokens", "0,900,5", "1.5,0,9", "2,800.0,7", ""]
    path.write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    done = planned(path, "--runs", "4")
    assert done.exit_code == 0 and "Buy " in done.stdout, done.output


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([row(0, 0), row(1, 5, 0)], "no prompt or no answer"),
        ([row(0, 10**8)], "the longest request has"),
        ([row(0), row(4e12)], "check the unit of the trace's times"),
    ],
    ids=("nothing left", "too long", "too late"),
)
def test_what_cannot_be_planned_is_one_line(
    rows: list[dict[str, Any]], said: str, tmp_path: Path
) -> None:
    done = planned(written(tmp_path, rows))
    assert done.exit_code == 1 and said in done.stderr.splitlines()[-1], done.output


def workload(*rows: TraceRow) -> Workload:
    return Workload(rows, 0)


@pytest.mark.parametrize("apart_s", [0.0, 1e-6])
def test_a_burst_begins_with_what_its_first_tokens_need(apart_s: float) -> None:
    """The trace has two hundred prompts of about a second each, which come almost together and may
    take 30 s."""
    rows = [TraceRow(apart_s * number, 16_000, 2) for number in range(200)]
    priced = Priced(parse_prices(), 327_680.0)
    found = prepare(workload(*rows), BASE, [A800], priced, 0.9, "disaggregated")
    [start] = found.starts
    assert 4 <= start.prefill <= 64


def program(num_calls: int, pause_s: float, prompt: int = 16_000) -> list[TraceRow]:
    return [
        TraceRow(
            0.0,
            prompt,
            20,
            session="a",
            call=f"a{number}",
            after=(f"a{number - 1}",) if number else (),
            delay_s=pause_s if number else 0.0,
        )
        for number in range(num_calls)
    ]


@pytest.mark.long
def test_calls_of_a_program_come_one_after_the_other() -> None:
    """Calls must come in the order of their programs. By their own times, all calls would arrive
    together, and one instance could not serve them."""
    one = Candidate(A800, A800, 0, 0, 1, 2_000_000, 512)
    calls = workload(*program(150, 60.0))
    demand = demand_of(calls, 256)
    assert demand.duration_s == 149 * 60.0
    assert Bounds(calls, BASE, demand).most_share(one) == 1.0
    assert run_trial(Trial(one.config(BASE)), calls).share == 1.0


def test_calls_that_are_never_sent_are_misses() -> None:
    """If a program is given up, all calls after the refused call must count as missed."""
    config = parse_config("", {"slo": {"ttft_s": 0.05}}, DEFAULTS)
    one = Candidate(A800, A800, 0, 0, 1, 2_000_000, 512)
    calls = workload(*program(10, 1.0, 100_000))
    found = run_trial(Trial(one.config(config)), calls)
    assert found.attainment.num_effective == 0 and sum(found.misses.values()) == 10
    ended = run_trial(Trial(one.config(config), give_up_below=0.9), calls)
    assert ended.gave_up and ended.share < 0.9
