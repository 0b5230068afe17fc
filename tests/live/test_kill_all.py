"""The test kills or stops every process but the supervisor at random: every stream ends right."""

from __future__ import annotations

import random

import pytest

from benchmarks.suite.live.kills import campaign as kills
from benchmarks.suite.live.kills.campaign import ARRANGEMENTS, Campaign, figures
from tests.live.conftest import MODEL
from tests.live.test_faults import shared_memory_names

SIZES = ("--kv-tokens", "16384", "--block-size", "16", "--max-num-batched-tokens", "128")
CAMPAIGN_S = 150.0
STOPS_S = (0.5, 6.0)
EVERYWHERE = {"head", "fork server", "spare fork server", "body reader"}


@pytest.mark.long
@pytest.mark.parametrize(
    ("arrangement", "kinds"),
    [
        ("2M", EVERYWHERE | {"mixed"}),
        ("stages", EVERYWHERE | {"prefill", "decode", "stage"}),
        ("ranks", {"decode", "rank"}),
        ("attention", {"prefill", "decode", "attention worker"}),
    ],
)
def test_no_death_but_the_supervisors_costs_an_answer(
    arrangement: str, kinds: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists the kinds of processes of which each is killed and stopped. Kinds that every
    arrangement has are hit in two arrangements."""
    monkeypatch.setattr(kills, "CALM_S", 1.0)
    before = shared_memory_names()
    said: list[str] = []
    model = MODEL.replace("layers=3", "layers=4")
    campaign = Campaign(
        ARRANGEMENTS[arrangement],
        16,
        random.Random(17),
        STOPS_S,
        said.append,
        (model, *SIZES),
        only=tuple(kinds),
    )
    campaign.run(len(kinds), len(kinds), CAMPAIGN_S)
    found = figures(campaign)
    assert found["troubles"] == [], said
    assert found["unheard"] <= 1, said
    assert found["answers"]["right"] > 16
    assert {row["kind"] for row in found["rows"]} == kinds, said
    assert [row for row in found["rows"] if row["not_recovered"]] == []
    assert found["corrupt_slices"] == 0, "a death damages no memory"
    assert (found["exit_status"], found["processes_left"]) == (0, 0)
    # Tests of a restart, which run at the same time, keep folders of this name.
    left = {name for name in shared_memory_names() if not name.startswith("moonpool-restart-")}
    assert left <= before
