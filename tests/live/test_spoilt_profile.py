"""Tests servers with wrong step times, which a busy machine or another machine measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from moonpool.cost.online import MAX_FACTOR
from moonpool_engine.engine.calibrate import StepSample
from tests.forked.commands import LocalServer
from tests.live.calls import fresh
from tests.live.test_ssd import DRAM, MODEL, PROMPT_TOKENS, Talk, plant_profile, serve

# The times are those of a slow model, and each was measured once. The short prefill was
# interrupted, so it took the longest.
SPOILT = [
    StepSample(kind="prefill", new_tokens=4, context_tokens=0, batch=1, seconds=0.90),
    StepSample(kind="prefill", new_tokens=32, context_tokens=0, batch=1, seconds=0.83),
    StepSample(kind="prefill", new_tokens=32, context_tokens=256, batch=1, seconds=0.84),
    StepSample(kind="decode", new_tokens=1, context_tokens=64, batch=1, seconds=0.05),
    StepSample(kind="decode", new_tokens=1, context_tokens=1024, batch=1, seconds=0.05),
    StepSample(kind="decode", new_tokens=4, context_tokens=256, batch=4, seconds=0.11),
]


@pytest.mark.long
def test_a_restarted_server_reads_its_disk_though_its_step_times_are_spoilt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, config = tmp_path / "ssd", tmp_path / "c.toml"
    with serve(folder, config, SPOILT) as server:
        talk = Talk(server.url)
        text, _ = talk.ask(0)
        talk.ask(0)  # finds the block again, so that it is copied to the disk first
        talk.wait_for_counters(ssd_written_blocks=PROMPT_TOKENS // 16)
        server.kill()
    with serve(folder, config, SPOILT) as server:
        again, cached = Talk(server.url).ask(0)
    assert again == text
    assert cached >= PROMPT_TOKENS - 2 * 16


FAST = [structs.replace(sample, seconds=1e-6) for sample in SPOILT]
"""Step times that are shorter than those of any machine."""


def test_the_first_prompt_corrects_the_prediction_of_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prediction must also be corrected on an instance that has computed no prompt."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plant_profile(FAST)
    with LocalServer([MODEL, "--mixed", "2", "--threads", "1", *DRAM]) as server:
        for number in range(2):
            body = {"prompt": [number + 5] * 200, "max_tokens": 1, "ignore_eos": True}
            answer = fresh.post(f"{server.url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
        found = fresh.get(f"{server.url}/beliefs").json()["instances"]
    assert [one["factors"]["prefill"] for one in found] == [MAX_FACTOR] * 2
