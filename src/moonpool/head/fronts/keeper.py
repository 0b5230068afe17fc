"""The supervisor's side of the fronts: keeps each front running, and holds its answers between two
processes."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from moonpool.children.process import ChildProcess
from moonpool.children.successors import Next, Successors
from moonpool.config.tables import Config
from moonpool.head.held_answers import HeldAnswers
from moonpool.head.serving_process import RESTARTS, HeadPackets, ServingProcess
from moonpool.protocol.supervision import (
    FinishHead,
    FromHead,
    HandOver,
    HeadBegin,
    HeadFailed,
    HeldState,
    TakeFront,
    TakeHead,
)

log = logging.getLogger("moonpool.supervisor")

BUSY_S = 300.0
"""A front that still works on calls may be silent for this long before it counts as hung."""
FINISH_S = 10.0
"""How long a front may take to end, when no answer is under way."""

Spawn = Callable[[str, socket.socket], Awaitable[ChildProcess]]


class Front:
    """One front process and its successors. `connect` returns the front's end of a connection to
    the head."""

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
        self.serving = ServingProcess(f"front {number}", held, self._on_packet, BUSY_S)
        self._begin = begin
        self._http = http
        self._spawn = spawn
        self._connect = connect
        self._wanted = asyncio.Event()
        self._wanted.set()

    async def run(self) -> None:
        """Runs front processes until cancelled."""
        name, held = self.serving.name, self.serving.held
        fronts = Successors(name, self._run_once, self._after, RESTARTS, log)
        await fronts.run(kept=lambda: f", and goes on with {len(held)} answers")

    async def _after(self, code: int | None) -> Next:
        if not self._wanted.is_set():
            return Next.AT_ONCE  # the next process starts as soon as a front is wanted again
        return self.serving.after_death()

    async def end(self, packet: FinishHead | HandOver, limit_s: float) -> None:
        """Lets the front end, and starts no other front until `go_on`."""
        self._wanted.clear()
        await self.serving.end(packet, limit_s)

    def go_on(self) -> None:
        self._wanted.set()

    async def _run_once(self) -> int | None:
        await self._wanted.wait()
        return await self.serving.run(
            self._tell, lambda theirs: self._spawn("front-process", theirs)
        )

    def _tell(self, packets: HeadPackets) -> None:
        held = self.serving.held
        begin = msgspec.structs.replace(self._begin, ended=tuple(held.culprits.alike))
        with self._connect(self.number) as to_head:
            packets.send(begin, (self._http.fileno(), to_head.fileno()))
        held.bequeath(packets)

    def _on_packet(self, packet: FromHead, fds: Sequence[int]) -> None:
        if isinstance(packet, HeadFailed):  # fronts load no model and have no workers
            log.error("%s: %s", self.serving.name, packet.message)


class Fronts:
    """All fronts of a cluster, or none if the head answers calls itself."""

    def __init__(
        self,
        config: Config,
        http: socket.socket,
        spawn: Spawn,
        secret: bytes,
        states: Sequence[HeldState] = (),
        cut_answers: Mapping[int, int] | None = None,
    ) -> None:
        """`states`: the fronts that an earlier program of this process has left. `cut_answers`: as
        for `HeldAnswers`; the first front gets these answers."""
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
            if front.serving.packets is not None:
                with self._connect(front.number) as to_head:
                    front.serving.packets.send(TakeHead(), (to_head.fileno(),))

    def _connect(self, number: int) -> socket.socket:
        """Returns a front's end of a new connection to the head. Without a head, the connection has
        already ended."""
        ours, theirs = socket.socketpair()
        with theirs:
            if self._head is not None:
                self._head.send(TakeFront(number=number), (theirs.fileno(),))
        return ours

    async def hand_over(self) -> None:
        """Ends the fronts. The supervisor holds their answers for the next fronts."""
        limit_s = self._config.api.drain_seconds + FINISH_S
        await asyncio.gather(*[front.end(HandOver(), limit_s) for front in self._fronts])

    def go_on(self) -> None:
        """Starts new fronts when no next program takes over."""
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
            front.serving.watch(listened_s)

    def running(self) -> dict[int, ServingProcess]:
        """Returns the running processes, by process id."""
        serving = [front.serving for front in self._fronts]
        return {each.process.pid: each for each in serving if each.process is not None}
