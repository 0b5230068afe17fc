"""A short soak with every kind of fault, and proof that it notices planted defects."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak import soak as soak_module
from tests.soak.cluster import SoakError
from tests.soak.content import answer, names, slice_bytes
from tests.soak.soak import Soak

pytestmark = pytest.mark.live


def run(folder: Path, operations: int, seed: int) -> Soak:
    soak = Soak(folder, operations, 3, seed, lambda text: None)
    try:
        soak.run()
    finally:
        soak.cluster.close()
    return soak


@pytest.mark.long
def test_a_short_soak_keeps_invariants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak_module, "CHECKPOINTS", 3)
    soak = run(tmp_path, 6000, 5)
    found = soak.figures(1.0)
    seen, counters = found["seen"], found["counters"]
    assert found["operations"] >= 6000
    for name in (
        "kills",
        "adopted blocks",
        "fault fill",
        "fault hang",
        "streams",
        "fetches",
        "aborted",
    ):
        assert seen[name] > 0, name
    for name in ("memory flips found by a peer", "disk flips found", "wire flips found"):
        assert seen[name] >= 3, name
    for name in ("put", "get", "left", "stored_blocks", "loaded_blocks", "received_shm"):
        assert counters[name] > 10, name


def test_an_unknown_flip_on_the_disk_ends_the_soak(tmp_path: Path) -> None:
    soak = Soak(tmp_path, 1000, 3, 6, lambda text: None)
    try:
        soak._faults.clear()
        soak._work_until(6000, 0)
        soak.checkpoint()
        member = max(soak.cluster.members, key=lambda m: len(m.on_ssd))
        assert any(soak.drills.flip_disk(member, key) for key in sorted(member.on_ssd))
        member.flipped.clear()
        soak.cluster.close()
        with pytest.raises(SoakError, match="bad blocks"):
            soak._verify_folders()
    finally:
        soak.cluster.close()


def test_contents_differ_by_prompt_layer_and_tenant() -> None:
    tokens = list(range(40))
    ours, theirs = names(tokens, ""), names(tokens, "other")
    assert len(ours) == 3 and not set(ours) & set(theirs)
    assert slice_bytes(ours[0], 0) != slice_bytes(ours[0], 1) != slice_bytes(ours[1], 1)
    assert answer(tokens, "", 3) != answer(tokens, "other", 3)
    assert answer(tokens, "", 3)[:2] == answer(tokens, "", 2)
