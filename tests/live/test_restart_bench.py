"""`moonpool bench restart` kills all processes of a server, which then has most of its cache hits
again."""

from __future__ import annotations

import pytest

from benchmarks.suite.live.restart import bench_restart


@pytest.mark.long
def test_a_restarted_server_has_most_of_its_hits() -> None:
    found = bench_restart("random:m30", prefix_tokens=1024, repeats=1)
    # a low limit, because the number of blocks written ahead depends on idle time
    assert found["ssd"]["hits_left"] > 0.5
    assert found["keep_memory"]["hits_left"] >= 0.95
    assert found["ssd"]["ttft_s"]["after_restart"] > 0
