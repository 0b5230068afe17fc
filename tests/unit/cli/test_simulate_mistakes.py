"""What `moonpool simulate` must refuse before it spends an hour on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from moonpool.cli.main import cli

ROW = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
PROFILE: dict[str, Any] = {"prefill": [0.01, 1e-4, 0, 0], "decode": [0.02, 0, 0]}


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(ROW) + "\n")
    return str(path)


def simulate(trace: str, *options: str) -> Result:
    result = CliRunner().invoke(cli, ["simulate", "--trace", trace, *options])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


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
