"""A process that serves calls, as its supervisor sees it: the head, or a front."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from moonpool.children.process import ChildProcess
from moonpool.children.stopped import is_stopped
from moonpool.children.successors import Next
from moonpool.head.held_answers import HeldAnswers
from moonpool.link.packets import PacketSocket, packet_pair
from moonpool.protocol.supervision import (
    FinishHead,
    FromHead,
    HandOver,
    HeadBeat,
    HeadUp,
    ToHead,
)
from moonpool.retry_delays import RetryDelays

log = logging.getLogger("moonpool.supervisor")

RESTARTS = RetryDelays((0.0, 0.0, 0.1, 0.5, 1.0, 2.0), steady_s=10.0)
HUNG_S = 30.0
"""A process whose loop does not turn for this long is killed. A stopped process is not hung: it is
replaced immediately, or left alone because of its TLS connections."""
LAST_PACKETS_S = 5.0

HeadPackets = PacketSocket[FromHead, ToHead]


class ServingProcess:
    """One process and its successors, one after the other."""

    def __init__(
        self,
        name: str,
        held: HeldAnswers,
        on_packet: Callable[[FromHead, Sequence[int]], None],
        busy_s: float = 0.0,
    ) -> None:
        """`on_packet` gets the packets that do not concern `held`. `busy_s`: replaces HUNG_S while
        the process goes from call to call."""
        self.name = name
        self.held = held
        self.process: ChildProcess | None = None
        self.packets: HeadPackets | None = None
        self._on_other_packet = on_packet
        self._busy_s = busy_s
        self._up_s: float | None = None
        self._heard_s: float | None = None  # time on the clock of listening
        self._listened_s = 0.0

    @property
    def is_heard(self) -> bool:
        """Whether the present process has begun to report that its loop turns."""
        return self._heard_s is not None

    async def run(
        self,
        tell: Callable[[HeadPackets], None],
        spawn: Callable[[socket.socket], Awaitable[ChildProcess]],
        fd: int | None = None,
    ) -> int | None:
        """Runs one process to its end. `tell` sends it the initial state; `spawn` starts it with
        its end of the connection. `fd`: the supervisor's end, if the process already has the other
        end.

        Returns its exit status, or None if it could not be started.
        """
        ours, theirs = packet_pair()
        if fd is not None:
            ours.close()
            ours = socket.socket(fileno=fd)
        silent = asyncio.Event()
        decoder = msgspec.msgpack.Decoder(FromHead)
        packets: HeadPackets = PacketSocket(ours, decoder, self._on_packet, silent.set)
        self.packets = packets
        self._up_s = self._heard_s = None
        try:
            tell(packets)
            self.process = await spawn(theirs)
            theirs.close()  # closed here, so that the pipe ends when the process ends
            code = await self.process.wait()
            # reads the messages that the process has still sent
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_PACKETS_S):
                    await silent.wait()
            number = self.held.culprits.judge(code, self.held)
            if number is not None:
                log.warning("%s ended while it worked on call %d", self.name, number)
            return code
        except OSError as error:
            log.error("cannot start %s: %s", self.name, error)
            return None
        finally:
            theirs.close()
            packets.close()
            self.kill()
            self.packets = self.process = None

    def after_death(self) -> Next:
        """Decides what follows after the process has died."""
        was_steady = self._up_s is not None and time.monotonic() - self._up_s > RESTARTS.steady_s
        return Next.AFTER_GOOD_LIFE if was_steady else Next.AFTER_DEATH

    async def end(self, packet: FinishHead | HandOver, limit_s: float) -> None:
        """Lets the process end, and kills it after `limit_s`."""
        if self.packets is not None:
            self.packets.send(packet)
        process = self.process
        if process is None:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await process.wait()
        self.kill()

    def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    def watch(self, listened_s: float) -> None:
        """Kills a process that hangs. Called every few seconds, with the time on the clock of
        listening."""
        self._listened_s = listened_s
        if self.process is None or self._heard_s is None:
            return
        silent_s = listened_s - self._heard_s
        is_busy = silent_s <= self._busy_s and self.held.culprits.is_working()
        if is_stopped(self.process.pid):
            self._heard_s = listened_s
        elif silent_s > HUNG_S and not is_busy:
            log.error("%s has not responded for %.0f s; killing it", self.name, silent_s)
            self.held.culprits.note_hang()
            self._heard_s = None
            self.kill()

    def kill_stopped(self) -> None:
        """Kills a process that a signal has stopped."""
        log.warning("%s is stopped by a signal (SIGSTOP); killing it", self.name)
        self.held.culprits.spare()
        self.kill()

    def _on_packet(self, packet: FromHead, fds: Sequence[int]) -> None:
        if self.held.take(packet, fds):
            return
        match packet:
            case HeadBeat():
                self._heard_s = self._listened_s
                return
            case HeadUp():
                self._up_s = time.monotonic()
            case _:
                pass
        self._on_other_packet(packet, fds)
