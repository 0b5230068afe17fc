"""`moonpool simulate` must refuse these mistakes before it spends an hour on them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from tests.cli_runner import invoke

ROW = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
PROFILE: dict[str, Any] = {"prefill": [0.01, 1e-4, 0, 0], "decode": [0.02, 0, 0]}


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    return str(path)


def simulate(trace: str, *options: str) -> Result:
    return invoke("simulate", "--trace", trace, *options)


def test_rows_that_are_no_requests_are_told(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    failed = ROW | {"output_length": 0}
    path.write_text("".join(json.dumps(row) + "\n" for row in (ROW, failed, failed)))
    result = simulate(str(path))
    assert "left out: 2 of 3 rows, which have no prompt or no answer" in result.output
    assert result.exit_code == 0


@pytest.mark.parametrize("option", ["--noise", "--speed", "--prefill-belief", "--decode-belief"])
def test_nan_is_no_number(trace: str, option: str) -> None:
    result = simulate(trace, option, "nan")
    assert result.exit_code != 0
    assert f"Invalid value for '{option}': 'nan' is no number" in result.output


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"prefill": [0.01, -1e-4, 0, 0]}, "negative time"),
        ({"decode": [-0.02, 0, 0]}, "negative time"),
        ({"transfer_latency_s": -1.0}, "negative time"),
        ({"network_bytes_per_s": 0.0}, "bandwidth of 0 or less"),
        ({"shared_memory_bytes_per_s": -1.0}, "bandwidth of 0 or less"),
    ],
)
def test_a_profile_of_impossible_times_is_refused(
    trace: str, tmp_path: Path, wrong: dict[str, Any], words: str
) -> None:
    path = tmp_path / "p.json"
    path.write_text(json.dumps(PROFILE))
    assert simulate(trace, "--cost", str(path)).exit_code == 0
    path.write_text(json.dumps(PROFILE | wrong))
    result = simulate(trace, "--cost", str(path))
    assert result.exit_code == 1
    assert f"{path} holds a {words}" in result.output and result.output.count("\n") == 1


@pytest.mark.parametrize("option", ["--json", "--report"])
def test_a_missing_folder_is_noticed_before_the_run(
    trace: str, tmp_path: Path, option: str
) -> None:
    result = simulate(trace, option, str(tmp_path / "no" / "file"))
    assert result.exit_code == 1
    assert result.output.startswith("moonpool: cannot write") and result.output.count("\n") == 1


def test_times_that_cannot_be_told_apart_are_refused(tmp_path: Path) -> None:
    """An earlier version ran without end, because at such a time one second later is the same
    float."""
    path = tmp_path / "far.jsonl"
    path.write_text("".join(json.dumps(ROW | {"timestamp": t}) + "\n" for t in (0, 10**22)))
    result = simulate(str(path))
    assert result.exit_code == 1
    assert result.output.startswith("moonpool: request 2 arrives 1e+19 s after the first")


def figures_of(trace: str, tmp_path: Path, *options: str) -> dict[str, Any]:
    found = tmp_path / "figures.json"
    assert simulate(trace, "--json", str(found), *options).exit_code == 0
    figures: dict[str, Any] = json.loads(found.read_text())
    return figures


def test_flags_change_what_the_file_says_and_nothing_else(trace: str, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("[cluster]\nprefill = 3\ndecode = 2\n[conductor]\nseed = 7\n")
    beside = figures_of(trace, tmp_path, "--config", str(file), "--mixed", "1")
    counts = beside["config"]["cluster"]
    assert (counts["prefill"], counts["decode"], counts["mixed"]) == (3, 2, 1)
    assert beside["seed"] == 7
    file.write_text("[conductor]\nseed = 7\n")
    alone = figures_of(trace, tmp_path, "--config", str(file), "--mixed", "1", "--seed", "0")
    counts = alone["config"]["cluster"]
    assert (counts["prefill"], counts["decode"], counts["mixed"]) == (0, 0, 1)
    assert (alone["seed"], alone["config"]["conductor"]["seed"]) == (0, 0)


@pytest.mark.parametrize("slow", ["prefill-0", "prefill-0=", "prefill-0=fast", "prefill-0=0"])
def test_how_slow_must_be_said(trace: str, slow: str) -> None:
    result = simulate(trace, "--slow", slow)
    assert result.exit_code != 0
    assert "NAME=FACTOR" in result.output


def test_what_is_slow_must_be_there(trace: str) -> None:
    result = simulate(trace, "--slow", "prefill-99=2")
    assert result.exit_code != 0
    assert "there is no instance 'prefill-99'" in result.output


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"prefill": [5.0]}, "takes 5 times"),
        ({"profile": PROFILE | {"prefill": [-1, 0, 0, 0]}}, "negative time"),
        ({"profile": PROFILE | {"decode": [0, 0, 0]}}, "takes no time"),
        ({"profile": PROFILE | {"network_bytes_per_s": 0.0}}, "bandwidth of 0"),
        ({"role": "cook"}, "not a record of"),
    ],
)
def test_impossible_beliefs_are_refused(
    trace: str, tmp_path: Path, wrong: dict[str, Any], words: str
) -> None:
    record = {"instance_id": "p", "role": "prefill", "profile": PROFILE, "decode": [1.0]} | wrong
    path = tmp_path / "beliefs.json"
    path.write_text(json.dumps({"instances": [record]}))
    result = simulate(trace, "--beliefs", str(path))
    assert result.exit_code != 0
    assert words in result.output


def test_beliefs_of_nobody_are_refused(trace: str, tmp_path: Path) -> None:
    path = tmp_path / "beliefs.json"
    path.write_text('{"instances": []}')
    assert "has no instances" in simulate(trace, "--beliefs", str(path)).output
    assert "cannot read the beliefs" in simulate(trace, "--beliefs", "nowhere").output
