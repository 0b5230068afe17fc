"""Tests that the watch over a host's pool ends with its worker, whatever the watch is doing."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from moonpool.vllm import pool_watch
from moonpool.vllm.pool_watch import PoolWatch

MOST_TURNS = 12
"""The number of turns of the loop after which the watch certainly waits for the next look."""


@pytest.mark.parametrize("turns", range(MOST_TURNS))
def test_it_ends_when_it_is_cancelled_in_any_turn(tmp_path: Path, turns: int) -> None:
    """This includes the turn in which the connection to a missing pool fails."""

    async def cancelled() -> bool:
        watch = PoolWatch(tmp_path / "none", "m", 16, lambda _: None, lambda *_: None)
        task = asyncio.create_task(watch.run())
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task], timeout=10)
        return task.cancelled()

    assert asyncio.run(cancelled())


def test_a_pool_that_says_nothing_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_watch, "CONNECT_S", 0.1)
    caplog.set_level(logging.DEBUG, "moonpool.vllm")

    async def follow() -> None:
        server = await asyncio.start_unix_server(lambda *_: asyncio.sleep(30), tmp_path / "pool")
        watch = PoolWatch(tmp_path / "pool", "m", 16, lambda _: None, lambda *_: None)
        task = asyncio.create_task(watch.run())
        async with asyncio.timeout(30):
            while "no KVCache pool" not in caplog.text:
                await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.wait([task], timeout=10)
        server.close()

    asyncio.run(follow())
    assert "the pool does not answer" in caplog.text
