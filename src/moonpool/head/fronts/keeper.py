"""The supervisor's side of the fronts: keeps each one running, and holds its answers meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from moonpool.children.process import ChildProcess
from moonpool.children.successors import Next, Successors
from moonpool.config.tables import Config
from moonpool.head.fork_server import is_stopped
from moonpool.head.held_answers import HeldAnswers
from moonpool.link.packets import PacketSocket, packet_pair
from moonpool.protocol.supervision import (
    FinishHead,
    FromHead,
    HandOver,
    HeadBeat,
    HeadBegin,
    HeadFailed,
    HeadUp,
    HeldState,
    TakeFront,
    TakeHead,
    ToHead,
)
from moonpool.retry_delays import RetryDelays

log = logging.getLogger("moonpool.supervisor")

RESTARTS = RetryDelays((0.0, 0.0, 0.1, 0.5, 1.0, 2.0), steady_s=10.0)
"""Of a front or a head that dies."""
HUNG_S = 30.0
"""A front that does not respond for this long hangs, unless it goes from call to call."""
BUSY_S = 300.0
FINISH_S = 10.0
"""How long a front may take to end, when no answer is under way."""
LAST_PACKETS_S = 5.0

Spawn = Callable[[str, socket.socket], Awaitable[ChildProcess]]
HeadPackets = PacketSocket[FromHead, ToHead]


class Front:
    """One front and its successors. `connect` returns its end of a connection to the head."""

    def __init__(
        self,
        number: int,
        begin: HeadBegin,
        http: socket.socket,
        spawn: Spawn,
        connect: Callable[[int], socket.socket],
        held: HeldAnswers,
    ) -> None:
        self.number = number
        self.held = held
        self.packets: HeadPackets | None = None
        self.process: ChildProcess | None = None
        self._begin = begin
        self._http = http
        self._spawn = spawn
        self._connect = connect
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._up_s: float | None = None
        self._beat_s: float | None = None
        self._listened_s = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        name = f"front {self.number}"
        fronts = Successors(name, self._run_once, self._after, RESTARTS, log)
        await fronts.run(kept=lambda: f", and goes on with {len(self.held)} answers")

    async def _after(self, code: int | None) -> Next:
        if not self._wanted.is_set():
            return Next.AT_ONCE  # when it is wanted again
        was_steady = self._up_s is not None and time.monotonic() - self._up_s > RESTARTS.steady_s
        return Next.AFTER_GOOD_LIFE if was_steady else Next.AFTER_DEATH

    async def end(self, packet: FinishHead | HandOver, limit_s: float) -> None:
        """Lets the front end, and starts no other one until `go_on`."""
        self._wanted.clear()
        if self.packets is not None:
            self.packets.send(packet)
        process = self.process
        if process is None:
            return
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), limit_s)
        self.kill()

    def go_on(self) -> None:
        self._wanted.set()

    def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()

    def watch(self, listened_s: float) -> None:
        """Kills a front that hangs. Called every few seconds with the clock of listening."""
        self._listened_s = listened_s
        if self.process is None or self._beat_s is None:
            return
        silent_s = listened_s - self._beat_s
        if is_stopped(self.process.pid):
            self._beat_s = listened_s
        elif silent_s > HUNG_S and not (silent_s < BUSY_S and self.held.culprits.is_working()):
            log.error("front %d has not responded for %.0f s; killing it", self.number, silent_s)
            self.held.culprits.note_hang()
            self._beat_s = None
            self.kill()

    async def _run_once(self) -> int | None:
        await self._wanted.wait()
        ours, theirs = packet_pair()
        silent = asyncio.Event()
        packets: HeadPackets = PacketSocket(
            ours, msgspec.msgpack.Decoder(FromHead), self._on_packet, silent.set
        )
        self._up_s = self._beat_s = None
        begin = msgspec.structs.replace(self._begin, ended=tuple(self.held.culprits.alike))
        with self._connect(self.number) as to_head:
            packets.send(begin, (self._http.fileno(), to_head.fileno()))
        self.held.bequeath(packets)
        self.packets = packets
        try:
            self.process = await self._spawn("front-process", theirs)
            theirs.close()  # so that ours ends with the front
            code = await self.process.wait()
            with contextlib.suppress(TimeoutError):  # what it has still sent
                await asyncio.wait_for(silent.wait(), LAST_PACKETS_S)
            number = self.held.culprits.judge(code, self.held)
            if number is not None:
                log.warning("front %d ended while it worked on call %d", self.number, number)
            return code
        except OSError as error:
            log.error("cannot start front %d: %s", self.number, error)
            return None
        finally:
            theirs.close()
            packets.close()
            self.packets = None
            self.kill()

    def _on_packet(self, packet: FromHead, fds: Sequence[int]) -> None:
        if self.held.take(packet, fds):
            return
        match packet:
            case HeadUp():
                self._up_s = time.monotonic()
            case HeadBeat():
                self._beat_s = self._listened_s
            case HeadFailed():
                log.error("front %d: %s", self.number, packet.message)
            case _:
                pass  # fronts load nothing and have no workers


class Fronts:
    """All fronts of a cluster; none if the head answers calls itself."""

    def __init__(
        self,
        config: Config,
        http: socket.socket,
        spawn: Spawn,
        secret: bytes,
        states: Sequence[HeldState] = (),
        cut_answers: Mapping[int, int] | None = None,
    ) -> None:
        """`states`: what an earlier program of this process has left. `cut_answers`: as for
        `HeldAnswers`; the first front gets them."""
        self._config = config
        self._http = http
        self._spawn = spawn
        self._secret = secret
        count = config.api.fronts if config.api.fronts > 1 else 0
        left = [*states, *[None] * count][: max(count, len(states))]
        self._held = [
            HeldAnswers(None if number else cut_answers, state) for number, state in enumerate(left)
        ]
        self._fronts: list[Front] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._head: HeadPackets | None = None

    @property
    def num_answers(self) -> int:
        return sum(len(held) for held in self._held)

    def start(self, head: HeadPackets) -> None:
        """Starts the fronts when the head serves for the first time."""
        self._head = head
        if self._fronts:
            return
        begin = HeadBegin(
            config=self._config, secret=self._secret, launch=False, num_restarts=0, expected={}
        )
        for number, held in enumerate(self._held):
            made = number, begin, self._http, self._spawn, self._connect, held
            self._fronts.append(Front(*made))
        self._tasks = [asyncio.create_task(front.run()) for front in self._fronts]

    def connect_all(self, head: HeadPackets) -> None:
        """Connects all fronts to a new head."""
        self._head = head
        for front in self._fronts:
            if front.packets is not None:
                with self._connect(front.number) as to_head:
                    front.packets.send(TakeHead(), (to_head.fileno(),))

    def _connect(self, number: int) -> socket.socket:
        """A front's end of a new connection to the head. Without a head, it has ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            if self._head is not None:
                self._head.send(TakeFront(number=number), (theirs.fileno(),))
        return ours

    async def hand_over(self) -> None:
        """Ends the fronts. Their answers are held for the next ones."""
        limit_s = self._config.api.drain_seconds + FINISH_S
        await asyncio.gather(*[front.end(HandOver(), limit_s) for front in self._fronts])

    def go_on(self) -> None:
        """Starts new fronts when there is no next program."""
        for front in self._fronts:
            front.go_on()

    async def finish(self) -> None:
        await asyncio.gather(*[front.end(FinishHead(), FINISH_S) for front in self._fronts])
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for held in self._held:
            held.close()

    def leave(self) -> tuple[HeldState, ...]:
        """Returns what the next program of the supervisor gets."""
        return tuple(held.leave() for held in self._held)

    def watch(self, listened_s: float) -> None:
        for front in self._fronts:
            front.watch(listened_s)

    def running(self) -> dict[int, Front]:
        """The running processes, by process id."""
        running = [front for front in self._fronts if front.process is not None]
        return {front.process.pid: front for front in running if front.process is not None}
