"""What ranks tell each other, through memory and through gloo."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from moonpool.engine.tensor.gloo import create_store
from moonpool.engine.tensor.group import Group, RankLostError, add_up
from moonpool.engine.tensor.memory import BUFFER_BYTES, create_meeting
from moonpool.engine.tensor.ranks import join_group

NUM_RANKS = 4
WAIT_S = 30.0


def together(works: list[Callable[[], Any]]) -> list[Any]:
    """Each in a thread of its own; what they return or raise."""
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
    fd = create_meeting(NUM_RANKS) if request.param == "memory" else create_store()
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
    """Also of more than a buffer holds, and of one sum after the other without a pause."""
    draw = torch.Generator().manual_seed(5)
    parts = [
        [torch.randn(rows, 256, generator=draw).to(dtype) for _ in range(2 * NUM_RANKS)]
        for rows in ROWS * 3
    ]

    def work(rank: int) -> list[torch.Tensor]:
        own = slice(2 * rank, 2 * rank + 2)
        return [groups[rank].sum([part.clone() for part in shards[own]]) for shards in parts]

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
            groups[rank].share(mine)
            groups[rank].meet()
            found.append(mine)
        return found

    for tensors in of_all(work):
        assert all(bool((one == rows).all()) for one, rows in zip(tensors, ROWS, strict=True))


def test_nobody_gets_past_a_meeting_before_the_last(groups: list[Group]) -> None:
    came: list[int] = []

    def work(rank: int) -> int:
        if rank == 2:
            time.sleep(0.2)
        came.append(rank)
        groups[rank].meet()
        return len(came)

    assert of_all(work) == [NUM_RANKS] * 4


def test_who_waits_for_one_that_is_gone_gives_up_when_told() -> None:
    fd = create_meeting(2)
    if fd is None:
        pytest.skip("the kernels are not built")
    waits, ends = (join_group(os.dup(fd), 0, 2, b"") for _ in range(2))
    timer = threading.Timer(0.3, ends.end)
    timer.start()
    began_s = time.monotonic()
    with pytest.raises(RankLostError):
        waits.sum([torch.zeros(2, 2)])
    assert 0.2 < time.monotonic() - began_s < 5
    with pytest.raises(RankLostError):
        waits.meet()
    os.close(fd)


def test_more_ranks_than_memory_has_seats_for_meet_otherwise() -> None:
    assert create_meeting(1000) is None
