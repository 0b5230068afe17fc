"""`moonpool replay` and `forecast` report which rows of a trace they leave out."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from moonpool.cli.inputs import report_skipped
from moonpool_lab.replay.run import ReplayPlan, run_replay
from moonpool_lab.replay.server import ServerUnfitError


def test_a_replay_tells_which_rows_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.jsonl"
    rows = [{"timestamp": 0, "input_length": 6, "output_length": n} for n in (3, 0, 0)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    plan = ReplayPlan(url="http://127.0.0.1:9", trace_file=str(path))
    with pytest.raises(ServerUnfitError):
        asyncio.run(run_replay(plan, opened=report_skipped))
    assert "left out: 2 of 3 rows" in capsys.readouterr().err
