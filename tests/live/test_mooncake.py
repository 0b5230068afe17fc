"""A Mooncake Store outlives the clusters that use it: a later cluster finds the blocks of an
earlier cluster, and goes on without the store when the store is gone. Needs the optional package.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forked.commands import LocalServer
from tests.live.conftest import MODEL
from tests.live.test_ssd import BLOCK_TOKENS, DRAM, NUM_PROMPTS, PROMPT_TOKENS, Talk, plant_profile
from tests.live.waiting import WAIT_S
from tests.mooncake_cluster import MooncakeCluster


@pytest.fixture(autouse=True)
def profile(tmp_path: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        plant_profile()
        yield


@pytest.fixture
def cluster() -> Iterator[MooncakeCluster]:
    cluster = MooncakeCluster()
    yield cluster
    cluster.stop()


def serve(cluster: MooncakeCluster) -> LocalServer:
    store = ["--threads", "1", "--mooncake-master", cluster.address]
    return LocalServer([MODEL, "--prefill", "1", "--decode", "1", *DRAM, *store])


def wait_for(talk: Talk, **least: float) -> Counter[str]:
    """Returns the counters of all instances; heartbeats bring them once a second."""
    by_s = time.monotonic() + WAIT_S
    while True:
        found: Counter[str] = Counter()
        for instance in talk.http.get("/cluster").json()["instances"]:
            found.update(instance.get("counters", {}))
        if all(found[name] >= value for name, value in least.items()):
            return found
        assert time.monotonic() < by_s, (least, found)
        time.sleep(0.1)


def test_a_cluster_that_starts_later_finds_what_was_computed(cluster: MooncakeCluster) -> None:
    blocks = NUM_PROMPTS * (PROMPT_TOKENS // BLOCK_TOKENS)
    with serve(cluster) as server:
        talk = Talk(server.url)
        assert talk.round() == 0
        # blocks are stored when they are computed, not when they are evicted
        wait_for(talk, ssd_written_blocks=blocks)
        expected = talk.expected
    with serve(cluster) as server:
        talk = Talk(server.url)
        talk.expected = expected  # The answers must be the same as before.
        assert talk.round() > 0.9 * blocks * BLOCK_TOKENS
        counters = wait_for(talk, loaded_blocks=1, found_blocks=1)
        assert counters["ssd_corrupt_slices"] == counters["ssd_failed_operations"] == 0
        cluster.stop()
        talk.round()  # expects the same answers again
