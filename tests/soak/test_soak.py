"""Runs a short soak with every kind of fault, and proves that it notices planted defects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.soak import soak as soak_module
from tests.soak.cluster import SoakError
from tests.soak.content import answer, names, slice_bytes
from tests.soak.soak import Soak

pytestmark = pytest.mark.live


SEEN_ONCE = ("kills", "adopted blocks", "fault fill", "fault hang", "streams", "fetches", "aborted")
FOUND = ("memory flips found by a peer", "disk flips found", "wire flips found")
COUNTED = ("put", "get", "left", "stored_blocks", "loaded_blocks", "received_shm")


def lacking(found: dict[str, Any]) -> list[str]:
    seen, counters = found["seen"], found["counters"]
    names = [name for name in SEEN_ONCE if seen.get(name, 0) < 1]
    names += [name for name in FOUND if seen.get(name, 0) < 3]
    return names + [name for name in COUNTED if counters.get(name, 0) <= 10]


@pytest.mark.long
def test_a_short_soak_keeps_invariants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_module, "CHECKPOINTS", 3)
    soak = Soak(tmp_path, 6000, 3, 5, lambda text: None)
    try:
        found = soak.run(lacking)
    finally:
        soak.cluster.close()
    assert found["operations"] >= 6000
    assert lacking(found) == []


@pytest.mark.long
def test_an_unknown_flip_on_the_disk_ends_the_soak(tmp_path: Path) -> None:
    soak = Soak(tmp_path, 1000, 3, 6, lambda text: None)
    try:
        soak.faults.clear()
        soak.work_until(6000, 0)
        soak.checkpoint()
        member = max(soak.cluster.members, key=lambda m: len(m.on_ssd))
        assert any(soak.drills.flip_disk(member, key) for key in sorted(member.on_ssd))
        member.flipped.clear()
        soak.cluster.close()
        with pytest.raises(SoakError, match="bad blocks"):
            soak.verify_folders()
    finally:
        soak.cluster.close()


def test_contents_differ_by_prompt_layer_and_tenant() -> None:
    tokens = list(range(40))
    ours, theirs = names(tokens, ""), names(tokens, "other")
    assert len(ours) == 3 and not set(ours) & set(theirs)
    assert slice_bytes(ours[0], 0) != slice_bytes(ours[0], 1) != slice_bytes(ours[1], 1)
    assert answer(tokens, "", 3) != answer(tokens, "other", 3)
    assert answer(tokens, "", 3)[:2] == answer(tokens, "", 2)
