"""Tests the comparison with another simulator: which figures are counted, and the report of a
failed run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.simulator_peer import PeerError, compare, measured
from moonpool.trace.builtin import BUILT_IN
from moonpool.trace.generate import generate
from moonpool.trace.jsonl import write_trace


def test_the_time_of_the_process_itself_is_counted() -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    found = measured("python", [sys.executable, "-c", busy])
    assert found["cpu_s"] >= 0.3
    assert found["peak_mb"] > 1


def test_a_failed_run_is_one_line() -> None:
    fails = [sys.executable, "-c", "import sys; print('no such trace'); sys.exit(3)"]
    with pytest.raises(PeerError, match=r"^dynamo ended with status 3: no such trace$"):
        measured("dynamo", fails)


def test_a_python_without_the_peer_is_told(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    write_trace(generate(BUILT_IN["conversation"], num_requests=2, seed=0), trace)
    with pytest.raises(PeerError, match=r"^dynamo ended with status 1: .*No module named 'dynamo'"):
        compare(trace, sys.executable, (1, 1, 1.0), 1)
