"""Takes a profile through a real cluster's HTTP API, and simulates the same cluster."""

from __future__ import annotations

import asyncio

import pytest

from moonpool_lab.profiling.live_profile import LiveProfiler
from tests.forked.commands import LocalServer


@pytest.mark.long
def test_a_cluster_is_measured_through_its_front_door(cluster: LocalServer) -> None:
    profile = asyncio.run(LiveProfiler(cluster.url, longest_tokens=1024).measure())
    cost = profile.cost
    # With a model this small, a busy neighbour hides the time that tokens alone take.
    assert cost.prefill_s(768, 384) > cost.prefill_s(64, 0) > 0
    assert cost.decode_step_s(8, 1024) >= cost.decode_step_s(1, 64) > 0
    assert min(cost.contention) >= 1.0 and max(cost.contention) < 20.0
    assert 0 <= cost.control_latency_s < 1.0 and 0 <= cost.front_s < 1.0
    pool = cluster.instances()[0]["pool"]
    assert cost.token_bytes * pool["block_tokens"] == pool["block_bytes"]
    assert profile.num_blocks == pool["blocks"]
    cached = [s for s in profile.prefills if s.cached_tokens]
    assert [s.cached_tokens for s in cached] == [384, 768]
    assert len(profile.decodes) >= 3
