"""Runs the demo as a new user does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long


def test_the_demo_shows_every_source_of_blocks_and_survives_a_kill(tmp_path: Path) -> None:
    figures, page = tmp_path / "demo.json", tmp_path / "demo.html"
    command = [sys.executable, "-m", "moonpool", "demo", "--users", "2", "--turns", "2"]
    command += ["--page", str(page), "--json", str(figures)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    figure = json.loads(figures.read_text())
    found, off = figure["cache_on"], figure["cache_off"]
    assert (found["requests"], off["requests"]) == (4, 2) and off["right"] == 2
    assert off["cache"]["hit_tokens"] == 0
    assert "cache on and off gave the same text" in done.stdout
    assert found["fetched_tokens"] > 0 and found["loaded_tokens"] > 0
    assert "ended right" in found["events"]["an instance died"]
    assert "in 2 attempts" in found["events"]["an instance died"]
    text = page.read_text()
    assert "an instance died" in text and "://" not in text, "the page asks for nothing outside"
    assert "serve --vllm" in done.stdout
