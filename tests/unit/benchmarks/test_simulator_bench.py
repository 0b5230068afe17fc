"""Tests the simulator's benchmark: each size runs in a separate process, and a failure is one
line."""

from __future__ import annotations

import pytest

from benchmarks.errors import BenchError
from benchmarks.suite.cluster.simulator import (
    NUM_MARKS,
    bench_simulator,
)


@pytest.mark.long
def test_each_size_is_run_and_its_memory_watched() -> None:
    small, large = bench_simulator(((2, 16), (4, 40)))
    for found, size in ((small, (2, 16)), (large, (4, 40))):
        assert (found["instances"], found["requests"]) == size
        assert found["events"] > found["requests"] and found["peak_mib"] > 10
        assert found["effective"] + found["rejected"] + found["failed"] <= found["requests"]
        assert [mark["arrived"] for mark in found["marks"]] == [
            found["requests"] // NUM_MARKS * n for n in range(1, NUM_MARKS + 1)
        ]


def test_a_run_that_breaks_says_which() -> None:
    with pytest.raises(BenchError, match="1 instances, 5 requests: "):
        list(bench_simulator(((1, 5),)))
