"""Tests systems of `moonpool bench trials`: a system that starts is tried, and a failure to start
is reported."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import uvloop

from benchmarks.cli.trials import SYSTEM_NAMES
from benchmarks.reliability_page import fuzz_section, mutant_section, trial_section
from benchmarks.suite.live.trials import (
    SYSTEMS,
    TrialTargets,
    added_to,
    bench_trials,
    connector_of,
)
from moonpool_lab.trial.run import TrialPlan, run_trial

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results"


def _no_try(url: str) -> dict[str, Any]:
    raise AssertionError(f"{url} should not have started")


def test_the_command_offers_every_system() -> None:
    assert SYSTEM_NAMES == SYSTEMS


def test_a_system_that_cannot_start_is_left_out_with_the_reason(tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    targets = TrialTargets(str(tmp_path), gguf=str(gguf), llama_python=sys.executable)
    found = bench_trials(targets, ("vllm", "llama.cpp"), _no_try, lambda text: None)
    assert found["servers"] == {}
    assert found["absent"]["vllm"] == "no --peer-python was given"
    assert "llama_cpp.server" in found["absent"]["llama.cpp"]


def test_a_later_command_adds_systems_of_the_same_model() -> None:
    kept = {"targets": {"model": "m"}, "servers": {"vllm": 1}, "absent": {"llama.cpp": "no file"}}
    found = {"targets": {"model": "m"}, "servers": {"llama.cpp": 2}, "absent": {}}
    both = added_to(kept, found)
    assert both["servers"] == {"vllm": 1, "llama.cpp": 2}
    assert both["absent"] == {}
    assert added_to(kept, found | {"targets": {"model": "other"}})["servers"] == {"llama.cpp": 2}
    assert added_to({}, found) == found


def test_connectors_are_what_vllm_parses() -> None:
    names = {
        s: connector_of(s)["kv_connector"] for s in SYSTEMS if s in ("vllm-offload", "vllm-lmcache")
    }
    assert names == {"vllm-offload": "OffloadingConnector", "vllm-lmcache": "LMCacheConnectorV1"}


@pytest.mark.long
def test_moonpool_is_tried_and_has_a_row() -> None:
    plan = {"requests": 6, "families": 1, "concurrency": 2, "fill_words": 0, "max_tokens": 8}

    def try_one(url: str, may_reset: bool) -> dict[str, Any]:
        return uvloop.run(run_trial(TrialPlan(url=url, may_reset=may_reset, **plan)))

    targets = TrialTargets("moonpool/induction")
    found = bench_trials(targets, ("moonpool", "vllm"), try_one, lambda text: None)
    assert found["servers"]["moonpool"]["load"]["answered"] >= 4
    assert found["servers"]["moonpool"]["proven"] == []
    origin = {"command": "x", "commit": "y", "machine": "z"}
    text = trial_section(found | {"origin": origin})
    assert "| moonpool | " in text and "| vllm | left out: no --peer-python" in text


def test_the_table_of_planted_bugs_has_a_row_each() -> None:
    found = json.loads((RESULTS / "mutants.json").read_text())
    text = mutant_section(found)
    for row in found["mutants"]:
        assert f"| {row['name']} | " in text


def test_the_table_of_fuzzing_has_the_counts() -> None:
    counts = dict.fromkeys(("crashes", "hangs", "tracebacks", "errors_5xx", "growth", "other"), 0)
    readers = {"config": counts | {"inputs": 1200, "hangs": 3, "seconds": 1.0}}
    text = fuzz_section({"inputs": 1200, "readers": readers, "origin": {"command": "c"}})
    assert "| config | 1,200 | 0 | 3 | 0 | 0 | 0 | 0 |" in text
