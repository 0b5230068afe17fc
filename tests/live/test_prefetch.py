"""A session's blocks come back from the SSD before its next turn."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.test_ssd import NUM_PROMPTS, Talk, plant_profile, serve

pytestmark = pytest.mark.long
PERIOD_S = 3.4
"""The time between turns of a session. Its blocks leave DRAM about two seconds after a turn."""
GIVE_UP_S = 300.0


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        plant_profile()
        yield


def test_blocks_are_in_dram_before_the_turn_that_needs_them(tmp_path: Path) -> None:
    with serve(tmp_path / "ssd", tmp_path / "c.toml") as server:
        talk = Talk(server.url)
        began_s = time.monotonic()
        used = 0.0
        turn = 0
        while not used:
            assert time.monotonic() - began_s < GIVE_UP_S, talk.instance()["counters"]
            number = turn % NUM_PROMPTS
            time.sleep(max(began_s + turn * PERIOD_S / NUM_PROMPTS - time.monotonic(), 0.0))
            text, _ = talk.ask(number)
            if len(talk.expected) == number:
                talk.expected.append(text)
            assert text == talk.expected[number]
            turn += 1
            if number == 0 and turn > 1:
                used = talk.instance().get("counters", {}).get("used_prefetched_blocks", 0.0)
        counters = talk.wait_for_counters(used_prefetched_blocks=1, ssd_read_blocks=1)
        assert counters["prefetched_blocks"] >= counters["used_prefetched_blocks"]
        metrics = talk.http.get("/metrics").text
        assert "moonpool:prefetched_blocks_total{" in metrics and 'state="used"' in metrics
