"""`moonpool bench cached` fetches a prefix from the process that still caches it."""

from __future__ import annotations

import pytest

from benchmarks.suite.live.cached import bench_cached


@pytest.mark.long
def test_a_prefix_is_fetched_by_who_has_lost_it() -> None:
    found = bench_cached("random:m30", prefix_tokens=1024, repeats=1)
    cached_tokens = found["cached_tokens"]
    assert cached_tokens["computed"] == 0
    assert cached_tokens["own_cache"] >= 1024 - 256
    assert cached_tokens["fetched"] == found["fetched_tokens"] >= 1024 - 256
    assert set(found["ttft_s"]) == set(cached_tokens)
