"""The watch over a host's pool ends with its worker, whatever the watch does then."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from moonpool.vllm.pool_watch import PoolWatch

MOST_TURNS = 12
"""The number of turns of the loop after which the watch certainly waits for the next look."""


@pytest.mark.parametrize("turns", range(MOST_TURNS))
def test_it_ends_when_it_is_cancelled_in_any_turn(tmp_path: Path, turns: int) -> None:
    """Whether this holds also in the turn in which the connection to a missing pool fails."""

    async def cancelled() -> bool:
        watch = PoolWatch(tmp_path / "none", "m", 16, lambda _: None, lambda *_: None)
        task = asyncio.create_task(watch.run())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=10)
        return task.cancelled()

    assert asyncio.run(cancelled())
