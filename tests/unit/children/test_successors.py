"""Tests processes that run one after the other: when the next process starts, and the log lines."""

from __future__ import annotations

import asyncio
import logging
import re

import pytest

from moonpool.children.successors import Next, Successors
from moonpool.retry_delays import RetryDelays

log = logging.getLogger("test.successors")


def run(ends: list[Next], delays_s: tuple[float, ...]) -> tuple[list[float], int]:
    """Returns the pauses between processes that end in this way, and the number of processes."""
    pauses: list[float] = []
    lives: list[int] = []

    async def live() -> int:
        lives.append(len(lives))
        return lives[-1]

    async def after(code: int | None) -> Next:
        assert code == lives[-1]
        return ends[code]

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    successors = Successors("a process", live, after, RetryDelays(delays_s), log)
    asyncio.run(successors.run(pause, lambda: ", and goes on"))
    return pauses, len(lives)


def test_each_death_in_short_succession_waits_longer_until_one_has_served_well() -> None:
    death, good = Next.AFTER_DEATH, Next.AFTER_GOOD_LIFE
    ends = [death, death, death, death, good, death, Next.NONE]
    assert run(ends, (0.0, 1.0, 2.0)) == ([0.0, 1.0, 2.0, 2.0, 0.0, 1.0], 7)


def test_one_that_makes_room_is_no_death(caplog: pytest.LogCaptureFixture) -> None:
    ends = [Next.AT_ONCE, Next.AFTER_DEATH, Next.AT_ONCE, Next.AFTER_DEATH, Next.NONE]
    assert run(ends, (0.5, 1.0)) == ([0.5, 1.0], 5)
    found = re.findall(
        r"a process ended with code (\d); the next one starts in (\S+) s", caplog.text
    )
    assert found == [("1", "0.5"), ("3", "1")]
    assert caplog.text.count(", and goes on") == 2
