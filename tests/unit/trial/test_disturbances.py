"""Tests that a restart command that fails gives one line, and leaves no process behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from moonpool.http_client.client import HttpClient
from moonpool_lab.trial import disturbances
from moonpool_lab.trial.disturbances import DisturbanceError, restart


def test_a_restart_command_that_does_not_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disturbances, "START_S", 1.0)
    pid_file = tmp_path / "pid"
    command = ["sh", "-c", f"echo $$ > {pid_file}; exec sleep 600"]
    with pytest.raises(DisturbanceError, match="did not end within 1 s"):
        asyncio.run(restart(HttpClient("http://127.0.0.1:9"), command))
    assert not Path("/proc", pid_file.read_text().strip()).exists()


def test_a_restart_command_that_is_not_there() -> None:
    with pytest.raises(DisturbanceError, match="nowhere: No such file or directory"):
        asyncio.run(restart(HttpClient("http://127.0.0.1:9"), ["nowhere"]))
