"""Tests the supervisor's view of a head or front, with a real process whose messages the test
sends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Sequence

import msgspec
import pytest

from moonpool.children.process import ChildProcess
from moonpool.children.start import start_child
from moonpool.children.stopped import is_stopped
from moonpool.children.successors import Next
from moonpool.head import serving_process
from moonpool.head.held_answers import HeldAnswers
from moonpool.head.serving_process import HUNG_S, HeadPackets, ServingProcess
from moonpool.link.packets import PacketSocket
from moonpool.protocol.supervision import (
    FinishHead,
    FromHead,
    HandOver,
    HeadBeat,
    HeadFailed,
    HeadUp,
    ToHead,
)
from moonpool.retry_delays import RetryDelays

SLEEPS = "import time; time.sleep(600)"


class Played:
    """A process that sleeps, while the test sends messages in its place."""

    def __init__(self, code: str = SLEEPS, busy_s: float = 0.0) -> None:
        self.code = code
        self.others: list[FromHead] = []
        self.heard: list[ToHead] = []
        self.serving = ServingProcess("the head", HeldAnswers(), self.on_packet, busy_s)
        self.packets: PacketSocket[ToHead, FromHead] | None = None

    def on_packet(self, packet: FromHead, fds: Sequence[int]) -> None:
        self.others.append(packet)

    async def spawn(self, theirs: socket.socket) -> ChildProcess:
        self.packets = PacketSocket(
            theirs.dup(),
            msgspec.msgpack.Decoder(ToHead),
            lambda packet, fds: self.heard.append(packet),
            lambda: None,
        )
        return await start_child([sys.executable, "-c", self.code], dict(os.environ))

    async def begin(self) -> asyncio.Task[int | None]:
        """Starts a process and returns its run."""
        running = asyncio.create_task(self.serving.run(self.tell, self.spawn))
        while self.serving.process is None:
            await asyncio.sleep(0.01)
        return running

    def tell(self, packets: HeadPackets) -> None:
        packets.send(HandOver())

    async def say(self, *packets: FromHead) -> None:
        assert self.packets is not None
        for packet in packets:
            self.packets.send(packet)
        self.packets.send(HeadFailed(message="the last"))
        while HeadFailed(message="the last") not in self.others:
            await asyncio.sleep(0.01)
        self.others.remove(HeadFailed(message="the last"))

    def leave(self) -> None:
        """Closes the end that belongs to the process."""
        assert self.packets is not None
        self.packets.close()


def test_one_that_is_silent_for_too_long_is_killed() -> None:
    async def run() -> int | None:
        played = Played()
        running = await played.begin()
        played.serving.watch(10 * HUNG_S)
        assert not played.serving.is_heard, "it loads for as long as it likes"
        await played.say(HeadBeat(), HeadUp())
        assert played.serving.is_heard and played.others == [HeadUp()]
        played.serving.watch(11 * HUNG_S)
        await played.say(HeadBeat())
        assert played.heard == [HandOver()] and played.serving.process is not None
        played.serving.watch(12 * HUNG_S)
        assert not running.done() and played.serving.is_heard
        played.serving.watch(12 * HUNG_S + 1)
        played.leave()
        code = await running
        assert played.serving.process is None and played.serving.packets is None
        return code

    assert asyncio.run(run()) == -signal.SIGKILL


def test_one_that_a_signal_has_stopped_is_not_hung() -> None:
    async def run() -> int | None:
        played = Played()
        running = await played.begin()
        await played.say(HeadBeat())
        process = played.serving.process
        assert process is not None
        os.kill(process.pid, signal.SIGSTOP)
        while not is_stopped(process.pid):
            await asyncio.sleep(0.01)
        played.serving.watch(2 * HUNG_S)
        assert process.returncode is None
        played.serving.kill_stopped()
        played.leave()
        return await running

    assert asyncio.run(run()) == -signal.SIGKILL


def test_one_that_does_not_end_in_time_is_killed() -> None:
    async def run() -> int | None:
        played = Played()
        running = await played.begin()
        await played.say(HeadBeat())
        await played.serving.end(FinishHead(), 0.2)
        assert played.heard == [HandOver(), FinishHead()]
        played.leave()
        return await running

    assert asyncio.run(run()) == -signal.SIGKILL


def test_one_that_cannot_start_has_no_status() -> None:
    async def refuses(theirs: socket.socket) -> ChildProcess:
        raise OSError("no more processes")

    async def run() -> None:
        played = Played()
        assert await played.serving.run(played.tell, refuses) is None
        assert played.serving.packets is None
        assert played.serving.after_death() is Next.AFTER_DEATH
        await played.serving.end(FinishHead(), 60.0)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("steady_s", "says_up", "follows"),
    [
        (0.0, True, Next.AFTER_GOOD_LIFE),
        (0.0, False, Next.AFTER_DEATH),
        (600.0, True, Next.AFTER_DEATH),
    ],
)
def test_the_delays_begin_again_after_one_that_has_served_for_a_while(
    monkeypatch: pytest.MonkeyPatch, steady_s: float, says_up: bool, follows: Next
) -> None:
    monkeypatch.setattr(serving_process, "RESTARTS", RetryDelays((0.0,), steady_s=steady_s))

    async def run() -> None:
        played = Played()
        running = await played.begin()
        await played.say(*([HeadUp()] if says_up else []))
        played.serving.kill()
        played.leave()
        assert await running == -signal.SIGKILL
        assert played.serving.after_death() is follows

    asyncio.run(run())
