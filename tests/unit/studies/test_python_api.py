"""Tests that the public Python API gives the results of the commands, and imports only what it
needs."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import moonpool
from moonpool import TraceRow, TraceRows
from tests.forked.commands import run_command


def command(folder: Path, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = run_command(*arguments, folder=folder, timeout_s=300)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("api")
    generate = ("--profile", "toolagent", "--requests", "120", "-o", "trace.jsonl")
    command(folder, "trace", "generate", *generate)
    return folder


@pytest.fixture(scope="module")
def result(folder: Path) -> moonpool.SimulationResult:
    trace = str(folder / "trace.jsonl")
    return moonpool.simulate(trace, prefill=2, decode=2, speed=0.5, placement="cache-aware")


def test_importing_is_light_and_a_simulation_needs_no_torch(folder: Path) -> None:
    code = (
        "import sys, moonpool\n"
        "assert not {'numpy', 'msgspec', 'click'} & set(sys.modules), 'import is not light'\n"
        "run = moonpool.simulate('trace.jsonl', requests=20, prefill=1, decode=1)\n"
        "run.html()\n"
        "assert run.summary['requests'] == 20\n"
        "heavy = {'torch', 'scipy', 'matplotlib', 'pandas', 'starlette', 'tokenizers'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_public_name_exists() -> None:
    for name in moonpool.__all__:
        assert getattr(moonpool, name) is not None
    assert set(moonpool.__all__) <= set(dir(moonpool))
    with pytest.raises(AttributeError, match="no attribute 'simulation'"):
        _ = moonpool.simulation  # type: ignore[attr-defined]


def test_the_summary_is_what_the_command_writes(
    folder: Path, result: moonpool.SimulationResult
) -> None:
    flags = ("--prefill", "2", "--decode", "2", "--speed", "0.5", "--placement", "cache-aware")
    command(folder, "simulate", "--trace", "trace.jsonl", *flags, "--json", "figures.json")
    written = json.loads((folder / "figures.json").read_text())
    result.save(folder / "saved.json")
    saved = json.loads((folder / "saved.json").read_text())
    del written["wall_s"], saved["wall_s"]
    assert written == saved


def test_the_tables_hold_the_figures(folder: Path, result: moonpool.SimulationResult) -> None:
    found, requests = result.summary, result.requests
    assert len(requests) == found["requests"] == 120
    assert requests["request"] == list(range(120))
    answered = [row for row in requests if row["outcome"] in ("stop", "length")]
    assert len(answered) == found["completed"]
    assert sum(row["effective"] for row in answered) == found["effective"]
    assert sum(row["cached_tokens"] for row in answered) == found["cache"]["hit_tokens"]
    mean_s = sum(row["ttft_s"] for row in answered) / len(answered)
    assert mean_s == pytest.approx(found["ttft_s"]["mean"], rel=1e-4)
    for row in answered:
        stages = ("placement_s", "queue_and_fetch_s", "prefill_s", "handover_s", "decode_s")
        assert sum(row[name] for name in stages) == pytest.approx(row["total_s"])
    assert [row["role"] for row in result.instances] == ["prefill"] * 2 + ["decode"] * 2
    assert max(result.timeline["completed"]) <= found["completed"]
    requests.to_csv(folder / "requests.csv")
    assert len(list(csv.reader((folder / "requests.csv").open()))) == 121
    frame = requests.to_pandas()
    assert list(frame.columns) == list(requests.columns)
    assert frame.effective.sum() == found["effective"]


def test_a_policy_may_be_an_object(folder: Path) -> None:
    calls = []

    class Last:
        def __call__(self, context: Any) -> int:
            calls.append(context.footprint.number)
            return int(context.possible.nonzero()[0][-1])

    trace = moonpool.read_trace(folder / "trace.jsonl", requests=30, speed=0.1)
    for policy in (Last, Last()):
        calls.clear()
        off = {"conductor": {"inline_prefill": False}}
        run = moonpool.simulate(trace, prefill=3, decode=1, placement=policy, config=off)
        assert len(calls) >= 30
        assert {row["prefill_instance"] for row in run.requests} == {"prefill-2"}
        assert "Last" in run.summary["config"]["conductor"]["placement"]


def test_requests_of_ones_own_making() -> None:
    rows = [TraceRow(at_s, 1000, 10, (1, 2 + at_s)) for at_s in range(10)]
    trace = TraceRows(rows, block_tokens=512)
    assert len(trace) == 10 and trace.table["blocks"] == [2] * 10
    run = moonpool.simulate(trace, prefill=1, decode=1)
    assert run.summary["completed"] == 10
    assert run.summary["cache"]["hit_tokens"] == 9 * 512
    for bad, text in (
        (lambda: TraceRows([]), "has no requests"),
        (lambda: TraceRows(rows[::-1], 512), "not in order of arrival"),
        (lambda: TraceRows(rows), "give the block_tokens"),
        (lambda: moonpool.simulate(trace, config={"cluster": {"prefil": 1}}), "did you mean"),
        (lambda: moonpool.simulate("nowhere.jsonl"), "cannot read nowhere.jsonl"),
        (lambda: moonpool.simulate(trace, config="nowhere.toml"), "cannot read the config"),
        (lambda: moonpool.simulate(trace, requests=0), "a limit of 0 requests leaves none"),
        (lambda: moonpool.simulate(trace, scale_tokens=2), "not above 0 and at most 1"),
    ):
        with pytest.raises(ValueError, match=text):
            bad()


@pytest.mark.parametrize(
    "table", [{"hardware": {"device": "H200"}}, {"model": {"quantization": "int4"}}]
)
def test_a_file_and_a_mapping_choose_the_same_hardware(
    table: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    ((name, keys),) = table.items()
    file = tmp_path / "cluster.toml"
    file.write_text("".join([f"[{name}]\n", *(f'{key} = "{keys[key]}"\n' for key in keys)]))
    rows = [TraceRow(2.0 * n, 400, 20) for n in range(5)]
    of_file, of_mapping = (moonpool.simulate(rows, config=each).summary for each in (file, table))
    assert of_file["ttft_s"] == of_mapping["ttft_s"]
    file.write_text(f"{name} = 3\n")
    with pytest.raises(ValueError, match=rf"\[{name}\] must be a table"):
        moonpool.simulate(rows, config=file)


@pytest.mark.long
def test_a_plan_is_a_configuration() -> None:
    rows = [TraceRow(i * 2.0, 4000, 20, tuple(range(i * 8, i * 8 + 8))) for i in range(40)]
    trace = TraceRows(rows, block_tokens=512)
    plan = moonpool.plan_cluster(trace, slo_ttft_s=30, slo_tbt_s=0.1, seeds=2, runs=40)
    assert "A800" in plan.advice
    run = moonpool.simulate(trace, config=plan.config)
    assert run.summary["effective_share"] >= 0.9
    cluster = plan.config["cluster"]
    assert sum(cluster.get(role, 0) for role in ("prefill", "decode", "mixed")) < 16


@pytest.mark.long
def test_runs_beside_each_other(folder: Path, result: moonpool.SimulationResult) -> None:
    slower = moonpool.simulate(folder / "trace.jsonl", prefill=2, decode=2)
    slower.save(folder / "slower.json")
    result.save(folder / "first.json")
    command(folder, "report", "first.json", "slower.json", "-o", "runs.html")
    page = (folder / "runs.html").read_text()
    moonpool.report([folder / "first.json", slower], folder / "own.html", ["first", "slower"])
    assert (folder / "own.html").read_text() == page
    assert "did not run on the same inputs as first: speed 0.5 and 1" in page
    assert "conductor.placement" in page and "cache-aware" in page and "kvcache-centric" in page
    assert "conductor.admission" not in page, "only settings that differ are shown"
    assert "://" not in page.replace("http://www.w3.org/2000/svg", ""), "it loads from elsewhere"
    for arguments, text in (
        (("trace.jsonl", "-o", "x.html"), "is no JSON"),
        (("nowhere.json", "-o", "x.html"), "cannot read the figures nowhere.json"),
        (("first.json", "-o", "x.html", "--name", "a", "--name", "b"), "2 names for 1 runs"),
    ):
        done = command(folder, "report", *arguments, check=False)
        assert done.returncode == 1 and text in done.stderr and "Traceback" not in done.stderr


def test_requests_alone_are_a_trace() -> None:
    rows = [TraceRow(2.0 * n, 400, 20) for n in range(5)]
    given = moonpool.simulate(rows, prefill=1, decode=1).summary
    held = moonpool.simulate(TraceRows(rows), prefill=1, decode=1).summary
    assert given["requests"] == 5 and given["ttft_s"] == held["ttft_s"]
    assert not given["trace_has_hashes"]
    with pytest.raises(ValueError, match=r"which is no moonpool\.TraceRow"):
        moonpool.simulate([(0.0, 400, 20)], prefill=1, decode=1)
    with pytest.raises(ValueError, match="give the block_tokens"):
        moonpool.simulate([TraceRow(0.0, 400, 20, (1,))], prefill=1, decode=1)
