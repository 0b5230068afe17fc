"""SIGSTOP stops a part of an instance: the head replaces the part, and streams continue within
seconds."""

from __future__ import annotations

import random

import pytest

from benchmarks.suite.live.kills import campaign as kills
from benchmarks.suite.live.kills.campaign import PAIR, Campaign, figures

LONGEST_PAUSE_S = 5.0
STOPS_S = (30.0, 30.0)  # so long that nothing continues because the process does


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("stage", ("--decode-pipeline-parallel-size", "2")),
        ("rank", ("--decode-tensor-parallel-size", "2")),
        ("attention worker", ("--attention", "1")),
        ("decode", ()),
    ],
)
def test_streams_go_on_soon_after_a_part_was_stopped(
    kind: str, flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kills, "CALM_S", 1.0)
    said: list[str] = []
    drawn = random.Random(3)
    campaign = Campaign((*PAIR, *flags), 8, drawn, STOPS_S, said.append, only=(kind,))
    campaign.run(kills=0, stops=2, seconds=120.0)
    found = figures(campaign)
    assert found["troubles"] == []
    (row,) = found["rows"]
    assert (row["kind"], row["times"], row["not_recovered"]) == (kind, 2, 0)
    # Without the replacement, each stream would last as long as the stop.
    assert 0.5 < row["pause_s"]["max"] < LONGEST_PAUSE_S, (said, row)
