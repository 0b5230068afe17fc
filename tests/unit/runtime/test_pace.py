"""Tests that a periodic task slows down without work, and notices a stopped child."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time

import pytest

from moonpool.children import stopped
from moonpool.children.stopped import StopNotice
from moonpool.link import idle_backoff as pace_module
from moonpool.link.idle_backoff import IdleBackoff

LONG_S = 600.0


def test_turns_are_soon_with_work_and_late_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace_module, "IDLE_TURNS", 3)

    async def run() -> None:
        pace = IdleBackoff(0.0, 0.001, LONG_S)
        for _ in range(10):
            await pace.next(is_busy=True)
        for _ in range(3):
            await pace.next(is_busy=False)
        quiet = asyncio.create_task(pace.next(is_busy=False))
        await asyncio.sleep(0.05)
        assert not quiet.done(), "the fourth turn without work came as soon as the others"
        pace.note()
        await asyncio.wait_for(quiet, 60)
        for _ in range(3):  # ticks at the short interval again
            await asyncio.wait_for(pace.next(is_busy=False), 60)

    asyncio.run(run())


def test_work_during_a_turn_gets_another_turn_soon() -> None:
    async def run() -> None:
        pace = IdleBackoff(0.05, LONG_S, LONG_S)
        turn = asyncio.create_task(pace.next(is_busy=True))
        await asyncio.sleep(0)
        pace.note()
        await turn
        await asyncio.wait_for(pace.next(is_busy=False), 60)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pace.next(is_busy=False), 0.1)

    asyncio.run(run())


def test_no_pause_is_longer_than_the_caller_says() -> None:
    asyncio.run(asyncio.wait_for(IdleBackoff(0.0, LONG_S, LONG_S).next(False, at_most_s=0.01), 60))


@pytest.mark.long
def test_a_stopped_child_is_told_of_and_nothing_else_wakes() -> None:
    async def run(child: subprocess.Popen[bytes]) -> None:
        notice = StopNotice()
        await notice.wait(any_stopped=False)  # makes the first look
        waiting = asyncio.create_task(notice.wait(any_stopped=False))
        await asyncio.sleep(2 * stopped.LOOK_S)
        assert not waiting.done()
        began_s = time.monotonic()
        child.send_signal(signal.SIGSTOP)
        await asyncio.wait_for(waiting, 60)
        assert time.monotonic() - began_s >= stopped.LOOK_S / 2
        await asyncio.wait_for(notice.wait(any_stopped=True), 60)

    # pytest's own children must not wake the task
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        try:
            asyncio.run(run(child))
        finally:
            child.kill()
