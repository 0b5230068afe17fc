"""The watch over a host's pool ends with its worker, whatever it does just then."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from moonpool.vllm.pool_watch import PoolWatch

MOST_TURNS = 12
"""Turns of the loop after which it certainly waits for the next look."""


@pytest.mark.parametrize("turns", range(MOST_TURNS))
def test_it_ends_when_it_is_cancelled_in_any_turn(tmp_path: Path, turns: int) -> None:
    """Also in the turn in which the connection to a pool that is not there fails."""

    async def cancelled() -> bool:
        watch = PoolWatch(tmp_path / "none", "m", 16, lambda _: None, lambda *_: None)
        task = asyncio.create_task(watch.run())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=10)
        return task.cancelled()

    assert asyncio.run(cancelled())
