"""The trial of the pool inside vLLM passes a right pool and finds a planted fault: loads without a
check of checksums. Needs MOONPOOL_VLLM_PYTHON, and MOONPOOL_VLLM_MODEL with a tokenizer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.live.test_vllm_layout import PYTHON, ROOT

pytestmark = [pytest.mark.live, pytest.mark.long, pytest.mark.timeout(1800)]
FAULT = Path(__file__).parent / "vllm_pool" / "no_checks"


def trial(*words: str) -> tuple[int, dict[str, Any]]:
    model = os.environ.get("MOONPOOL_VLLM_MODEL")
    if PYTHON is None or model is None:
        pytest.skip("needs a vLLM: MOONPOOL_VLLM_PYTHON and MOONPOOL_VLLM_MODEL")
    line = [sys.executable, "-m", "benchmarks.pool_trial", "--vllm", PYTHON, "--model", model]
    line += ["--requests", "48", "--sessions", "2", "--tenants", "2", *words]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


def test_no_answer_is_wrong_under_kills_and_damage() -> None:
    status, found = trial("--kills", "3")
    assert found["proven"] == []
    assert status == 0
    done = found["disturbances"]
    assert (done["kills of the pool"], done["kills of the vllm"], done["kills of the head"]) == (
        (1,) * 3
    )
    assert done["places damaged in a running pool"] > 0
    assert found["found_in_pool"] > 0


def test_blocks_that_nobody_checks_are_found_out(tmp_path: Path) -> None:
    named = tmp_path / "planted-0.dist-info"
    named.mkdir()
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 0\n")
    plugin = "[vllm.general_plugins]\nplanted = moonpool_planted_no_checks:register\n"
    (named / "entry_points.txt").write_text(plugin)
    words = ("--kills", "1", "--damage-share", "1", "--modules", str(FAULT))
    status, found = trial(*words, "--modules", str(tmp_path))
    assert found["pool"]["wrong"] > 0
    assert found["proven"]
    assert status == 1
