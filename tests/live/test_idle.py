"""An idle cluster, measured by `moonpool bench idle`, takes only the memory that it uses, not its
limits, and hardly wakes up."""

from __future__ import annotations

import pytest

from benchmarks.suite.live.idle import bench_idle


@pytest.mark.long
def test_an_idle_cluster_of_a_toy_model_takes_little_memory_and_sleeps() -> None:
    said: list[str] = []
    found = bench_idle("moonpool/induction", 1, 1, [], 5.0, said.append)
    names = {row["process"] for row in found["processes"]}
    assert names == {
        "supervisor",
        "fork server",
        "spare fork server",
        "head",
        "prefill-0",
        "decode-0",
    }
    for row in found["processes"]:
        assert row["kvcache_mib"] < 64, row  # of the pools, which may grow to 640 MiB
        assert row["memory_mib"] > 0
    # The counts are taken soon after the start: two ticks a second of the head, one heartbeat of
    # each worker.
    wakeups = {row["process"]: row["wakeups_per_s"] for row in found["processes"]}
    assert wakeups["supervisor"] < 1.5 and wakeups["fork server"] < 0.5, wakeups
    assert wakeups["head"] < 7 and wakeups["prefill-0"] < 2.5, wakeups
    assert found["sum"]["cpu_percent"] > 0
    assert found["sum"]["all_mb"] < 600
    assert said[-1].endswith("MB in all")


@pytest.mark.long
def test_a_pool_of_a_chosen_size_is_taken_whole() -> None:
    flags = ["--kv-tokens", "16384", "--dtype", "float32"]
    found = bench_idle("moonpool/induction", 1, 1, flags, 1.0, lambda line: None)
    taken = [row["kvcache_mib"] for row in found["processes"] if "-0" in row["process"]]
    assert len(taken) == 2 and min(taken) >= 160
