"""Tests collective operations of ranks, over shared memory and over gloo."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from moonpool_engine.engine.parallel.tensor_gloo import create_store
from moonpool_engine.engine.parallel.tensor_group import (
    BUFFER_BYTES,
    Group,
    RankLostError,
    add_up,
    create_group_memory,
)
from moonpool_engine.engine.parallel.tensor_ranks import join_group

NUM_RANKS = 4
WAIT_S = 30.0


def together(works: list[Callable[[], Any]]) -> list[Any]:
    """Runs each function in a separate thread; returns their results or errors."""
    outcomes: list[Any] = [None] * len(works)

    def run(number: int) -> None:
        try:
            outcomes[number] = works[number]()
        except RankLostError as error:
            outcomes[number] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    return outcomes


def of_all(work: Callable[[int], Any]) -> list[Any]:
    return together([partial(work, rank) for rank in range(NUM_RANKS)])


@pytest.fixture(scope="module", params=["memory", "gloo"])
def groups(request: pytest.FixtureRequest) -> list[Group]:
    fd = create_group_memory(NUM_RANKS) if request.param == "memory" else create_store()
    if fd is None:
        pytest.skip("the kernels are not built")
    secret = b"" if request.param == "memory" else b"one that all ranks know"

    def join(rank: int) -> Group:
        return join_group(os.dup(fd), rank, NUM_RANKS, secret)

    return of_all(join)


ROWS = (1, 3, BUFFER_BYTES // 512 - 1, BUFFER_BYTES // 512, BUFFER_BYTES // 200)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_have_the_sum_of_all_shards_bit_for_bit(
    groups: list[Group], dtype: torch.dtype
) -> None:
    """This includes tensors larger than a buffer, and sums that follow each other without a
    pause."""
    draw = torch.Generator().manual_seed(5)
    parts = [
        [torch.randn(rows, 256, generator=draw).to(dtype) for _ in range(2 * NUM_RANKS)]
        for rows in ROWS * 3
    ]

    def work(rank: int) -> list[torch.Tensor]:
        own = slice(2 * rank, 2 * rank + 2)
        return [groups[rank].all_reduce([part.clone() for part in shards[own]]) for shards in parts]

    found = of_all(work)
    for number, shards in enumerate(parts):
        expected = add_up([part.clone() for part in shards])
        for sums in found:
            assert torch.equal(sums[number], expected)


def test_the_first_ones_reach_all(groups: list[Group]) -> None:
    def work(rank: int) -> list[torch.Tensor]:
        found = []
        for rows in ROWS:
            mine = torch.full((rows, 256), float(rows)) if rank == 0 else torch.zeros(rows, 256)
            groups[rank].broadcast(mine)
            groups[rank].barrier()
            found.append(mine)
        return found

    for tensors in of_all(work):
        assert all(bool((one == rows).all()) for one, rows in zip(tensors, ROWS, strict=True))


def test_a_barrier_waits_for_the_last_rank(groups: list[Group]) -> None:
    came: list[int] = []

    def work(rank: int) -> int:
        if rank == 2:
            time.sleep(0.2)
        came.append(rank)
        groups[rank].barrier()
        return len(came)

    assert of_all(work) == [NUM_RANKS] * 4


def test_an_abort_ends_the_wait_for_a_lost_rank() -> None:
    fd = create_group_memory(2)
    if fd is None:
        pytest.skip("the kernels are not built")
    waits, ends = (join_group(os.dup(fd), 0, 2, b"") for _ in range(2))
    timer = threading.Timer(0.3, ends.abort)
    timer.start()
    with pytest.raises(RankLostError):
        waits.all_reduce([torch.zeros(2, 2)])
    with pytest.raises(RankLostError):
        waits.barrier()
    os.close(fd)


def test_too_many_ranks_get_no_shared_memory() -> None:
    assert create_group_memory(1000) is None
