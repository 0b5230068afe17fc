"""Tests that an operator's frames show the pool's hot prefixes and transfers, and a tenant's frames
show neither."""

from __future__ import annotations

from typing import Any

import pytest
from conductor_desk import Desk

from moonpool.conductor.actions import HotRequested
from moonpool.head.watch.live_view import (
    MAX_CACHED_BLOCKS,
    WATCHED_EVERY_S,
    WINDOW_S,
    LiveView,
    moved_bytes,
)
from moonpool.protocol.messages import BlocksSnapshot, HotPrefix, HotPrefixes, InstanceLoad
from moonpool.types import BlockKey

KEYS = tuple(BlockKey(bytes([n]) * 16) for n in (1, 2, 3))


def load(cached_blocks: int = 3, **counters: float) -> InstanceLoad:
    return InstanceLoad(0, 0, 0, cached_blocks, 0, {}, counters)


class Cluster:
    """Makes a view over a Conductor with two instances that both hold `KEYS`."""

    def __init__(self) -> None:
        self.desk = Desk("p0", "d0")
        self.posted: list[HotRequested] = []
        self.view = LiveView([self.desk.conductor], self.posted.append, lambda: self.desk.now)
        self.desk.report("p0", BlocksSnapshot(next_sequence=0, keys=KEYS))
        self.desk.report("d0", BlocksSnapshot(next_sequence=0, keys=(), demoted=KEYS))

    def frame(self, tenant: str | None = None) -> dict[str, Any]:
        return self.view.frame([], tenant)


def test_an_operator_sees_the_hottest_prefixes_with_their_copies() -> None:
    cluster = Cluster()
    assert not cluster.posted, "nobody looks"
    assert cluster.frame()["hot"] == []
    assert len(cluster.posted) == 1
    report = HotPrefixes(number=0, prefixes=(HotPrefix(KEYS, 7),))
    cluster.desk.report("p0", report)
    (hot,) = cluster.frame()["hot"]
    assert (hot["key"], hot["hits"]) == (KEYS[-1].hex(), 7)
    assert (hot["dram"], hot["ssd"]) == (["p0"], ["d0"])
    assert len(cluster.posted) == 1
    cluster.desk.now += WATCHED_EVERY_S
    assert cluster.frame()["hot"] == [hot], "the former list stands until the next one arrives"
    assert len(cluster.posted) == 2


def test_a_tenant_sees_none_and_makes_nobody_rank() -> None:
    cluster = Cluster()
    cluster.desk.report("p0", HotPrefixes(number=0, prefixes=(HotPrefix(KEYS, 7),)))
    cluster.desk.report("p0", load(fetched_bytes=5.0))
    frame = cluster.frame("ann")
    assert "hot" not in frame and "moved" not in frame
    assert KEYS[-1].hex() not in str(frame)
    assert not cluster.posted


def test_an_instance_with_very_many_blocks_is_not_asked() -> None:
    cluster = Cluster()
    cluster.desk.report("p0", load(MAX_CACHED_BLOCKS + 1))
    assert cluster.frame()["hot"] is None
    assert not cluster.posted


def test_bytes_are_told_apart_by_what_they_were_moved_for() -> None:
    counters = {"fetched_bytes": 1000.0, "taken_over_blocks": 3.0, "loaded_bytes": 7.0}
    moved = moved_bytes(counters | {"received_bytes": 50.0, "sent_bytes": 60.0}, 100)
    assert (moved["fetched"], moved["copied"]) == (700, 300)
    assert (moved["handed_over"], moved["sent"]) == (50, 60)
    assert (moved["ssd_loaded"], moved["ssd_stored"]) == (7, 0)


def test_rates_are_those_of_the_last_seconds() -> None:
    cluster = Cluster()
    cluster.desk.report("p0", load(fetched_bytes=100.0))
    (moved,) = cluster.frame()["moved"]
    assert moved["bytes"]["fetched"] == 100 and moved["bytes_per_s"] is None
    cluster.desk.now += 4.0
    cluster.desk.report("p0", load(fetched_bytes=500.0))
    assert cluster.frame()["moved"][0]["bytes_per_s"]["fetched"] == pytest.approx(100)
    cluster.desk.now += WINDOW_S + 1
    assert cluster.frame()["moved"][0]["bytes_per_s"] is None, "nobody looked for a while"
    cluster.desk.now += 5.0
    assert cluster.frame()["moved"][0]["bytes_per_s"]["fetched"] == 0
