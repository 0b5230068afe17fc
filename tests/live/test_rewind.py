"""The log of a live server replays with equal decisions, through kills and new segments."""

from __future__ import annotations

import json
import os
import signal
import stat
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli_runner import succeed
from tests.forked.commands import LocalServer
from tests.live.conftest import MODEL, SMALL

pytestmark = pytest.mark.live


@pytest.mark.parametrize("log_bytes", [32 << 20, pytest.param(20_000, marks=pytest.mark.long)])
def test_a_live_log_replays(log_bytes: int, tmp_path: Path) -> None:
    (tmp_path / "c.toml").write_text(f"[api]\nevent_log_bytes = {log_bytes}\n")
    arguments = [MODEL, "--prefill", "2", "--decode", "1", "--config", str(tmp_path / "c.toml")]
    with LocalServer([*arguments, *SMALL]) as server:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            text = ""
            for number in range(24):
                if number == 8:
                    os.kill(server.instances()[0]["pid"], signal.SIGKILL)
                body: dict[str, Any] = {
                    "prompt": [number % 5 + 1] * 200,
                    "max_tokens": 24,
                    "seed": 1,
                }
                # ends the stream early, because an answer that the API ends is an event, too
                if number > 18:
                    body["stop"] = [text[5:6], text[8:9]]
                answer = client.post("/v1/completions", json=body)
                assert answer.status_code == 200, answer.text
                if number <= 18:
                    text = answer.json()["choices"][0]["text"]
        saved, figures = tmp_path / "log", tmp_path / "figures.json"
        last = answer.json()["id"].removeprefix("cmpl-")
        command = ["rewind", server.url, "--save", str(saved), "--json", str(figures)]
        done = succeed(*command, "--request", last)
        assert "decides the same each time" in done.output
        assert "prefill on" in done.output
        server.stop()
    found = json.loads(figures.read_text())
    assert found["differences"] == 0 and found["decisions"] > 5
    assert (found["requests"] == 24) == (log_bytes > 1 << 20)
    assert stat.S_IMODE(saved.stat().st_mode) == 0o600
