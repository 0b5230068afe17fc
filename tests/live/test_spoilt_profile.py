"""Step times that a busy machine has spoilt do not keep a server from reading its disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool_engine.engine.calibrate import StepSample
from tests.live.test_ssd import PROMPT_TOKENS, Talk, serve

# Of a slow model, measured once each: the short prefill was interrupted, so it took the longest.
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
        talk.ask(0)  # found again, so it is copied to the disk first
        talk.wait_for_counters(ssd_written_blocks=PROMPT_TOKENS // 16)
        server.kill()
    with serve(folder, config, SPOILT) as server:
        again, cached = Talk(server.url).ask(0)
    assert again == text
    assert cached >= PROMPT_TOKENS - 2 * 16
