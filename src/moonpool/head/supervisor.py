"""Keeps one head running, and the workers and fronts of a cluster.

The supervisor owns the workers and the listening sockets, so that connections wait while there is
no head. The supervisor holds the sockets and the logs of answers under way, and gives them to the
next head. The supervisor makes no decision about requests, and imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import resource
import socket
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
import setproctitle

from moonpool.children.process import ChildProcess, ForkedProcess
from moonpool.children.start import moonpool_line, start_child
from moonpool.children.stopped import StopNotice, StoppedProcesses
from moonpool.children.successors import Next, Successors
from moonpool.config.tables import Config
from moonpool.cores import CoreShare
from moonpool.head.cluster_error import ClusterError
from moonpool.head.fork_server import ForkServer, ForkServerError
from moonpool.head.fronts.keeper import Fronts
from moonpool.head.held_answers import HeldAnswers
from moonpool.head.launcher import LocalLauncher, worker_environment
from moonpool.head.serving_process import RESTARTS, HeadPackets, ServingProcess
from moonpool.head.succession import NextHead, SuccessionError, become_next, load_head, try_state
from moonpool.link.silence import ListeningClock
from moonpool.protocol.model_offer import ModelOffer
from moonpool.protocol.supervision import (
    FinishHead,
    FromHead,
    HandOver,
    HeadBegin,
    HeadEnding,
    HeadFailed,
    HeadLoaded,
    HeadPrepared,
    HeadUp,
    InstancesKnown,
    KillWorker,
    ReplaceWorker,
    SupervisorState,
    UpgradeFailed,
    UpgradeWanted,
    WorkerCrashed,
)
from moonpool.types import InstanceId, Role

if TYPE_CHECKING:
    from moonpool.head.takeover.standby import Takeover

log = logging.getLogger("moonpool.supervisor")

WATCH_S = 5.0
FINISH_S = 30.0
"""How long a head may take to end, in addition to its drain."""
MAX_FILES = 20_480


class Supervisor:
    """`run` serves until `stop` is set. `Supervisor` is made before the loop runs, and owns the
    listening sockets."""

    def __init__(
        self,
        config: Config,
        secret: bytes,
        launch: bool,
        http: socket.socket,
        control: socket.socket,
        fork_server: ForkServer | None,
        state: SupervisorState | None = None,
        taken: Takeover | None = None,
    ) -> None:
        """`launch`: whether to start the workers of the configuration. Without `fork_server`, head
        and workers start as new interpreters. `state`: the state that an earlier program of this
        process has left. `taken`: the state that a lost head on another machine has left."""
        self._config = config
        self._secret = secret
        self._launch = launch
        self._http = http
        self._control = control
        self._fork_server = fork_server
        self._launcher: LocalLauncher | None = None
        self._discovery: asyncio.Task[None] | None = None
        cut = None if taken is None else dict(enumerate(taken.answers))
        fronts = () if state is None else state.fronts
        self._fronts = Fronts(config, http, self._spawn, secret, fronts, cut)
        cut = None if config.api.fronts > 1 else cut
        held = HeldAnswers(cut, state)
        self._head = ServingProcess("the head", held, self._on_packet)
        self._expected: dict[InstanceId, Role] = {} if taken is None else taken.instances
        self._offers: dict[InstanceId, ModelOffer] = {} if taken is None else taken.offers
        self._epoch = 1 if taken is None else taken.epoch
        self._num_restarts = self._num_upgrades = 0
        self._prepared: HeadPrepared | None = None
        self._state = state
        self._next_head: NextHead | None = None
        self._upgrade: asyncio.Task[None] | None = None
        self._was_up = False
        self._fatal = ""
        self._clock = ListeningClock(time.monotonic(), 2 * WATCH_S)
        self._stopped = StoppedProcesses()

    async def run(self, stop: asyncio.Event) -> None:
        """Raises ClusterError if the cluster cannot start."""
        _raise_file_limit(self._config.api.fronts)
        watches = [asyncio.create_task(self._watch()), asyncio.create_task(self._look())]
        try:
            if self._state is not None:
                self._adopt(self._state)
            await self._keep_head(stop)
        finally:
            for watch in watches:
                watch.cancel()
            await self._fronts.finish()
            await self._end()

    @property
    def _num_answers(self) -> int:
        return len(self._head.held) + self._fronts.num_answers

    async def _keep_head(self, stop: asyncio.Event) -> None:
        async def wait(seconds: float) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await stop.wait()

        async def live() -> int | None:
            return None if stop.is_set() else await self._run_head(stop)

        async def after(code: int | None) -> Next:
            return await self._after_head(code, stop)

        heads = Successors("the head", live, after, RESTARTS, log)
        await heads.run(wait, lambda: f", and goes on with {self._num_answers} answers")

    async def _after_head(self, code: int | None, stop: asyncio.Event) -> Next:
        """Raises ClusterError."""
        if self._fatal:
            raise ClusterError(self._fatal)
        if stop.is_set():
            return Next.NONE
        if self._next_head is not None:
            await self._succeed(self._next_head)
            return Next.AT_ONCE  # reached only if the succession failed
        if not self._was_up:
            text = f"the head ended with code {code} while it started; see the log above"
            raise ClusterError(text)
        self._num_restarts += 1
        return self._head.after_death()

    async def _run_head(self, stop: asyncio.Event) -> int | None:
        """Runs one head to its end. Returns its exit status, or None if it could not be started."""
        waiting, self._state = self._state, None

        async def spawn(theirs: socket.socket) -> ChildProcess:
            if waiting is not None:  # an earlier program of this process has started the head
                return ForkedProcess(waiting.head_pid)
            return await self._spawn("head-process", theirs)

        fd = None if waiting is None else waiting.head_fd
        running = asyncio.create_task(self._head.run(self._bequeath, spawn, fd))
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({running, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not running.done() and self._head.process is not None:
                await self._head.end(FinishHead(), self._config.api.drain_seconds + FINISH_S)
            elif not running.done():
                return None
            return await running
        finally:
            for task in (running, stopped):
                task.cancel()
            await asyncio.gather(running, stopped, return_exceptions=True)

    def _bequeath(self, packets: HeadPackets) -> None:
        begin = HeadBegin(
            config=self._config,
            secret=self._secret,
            launch=self._launch,
            num_restarts=self._num_restarts,
            num_upgrades=self._num_upgrades,
            expected=self._expected,
            epoch=self._epoch,
            ended=tuple(self._head.held.culprits.alike),
            offers=self._offers,
        )
        packets.send(begin, (self._http.fileno(), self._control.fileno()))
        self._head.held.bequeath(packets)
        self._fronts.connect_all(packets)

    async def _spawn(self, command: str, theirs: socket.socket) -> ChildProcess:
        """Starts a head or a front, which gets its end of a pair of packet sockets."""
        line, fd = [command, "--fd"], theirs.fileno()
        if self._fork_server is not None:
            try:
                return await self._fork_server.fork(line, fd)
            except ForkServerError as error:
                log.debug("%s starts as a new interpreter: %s", command, error)
        return await start_child(moonpool_line(*line, str(fd)), self._environment(), (fd,))

    # Packets of the head

    def _on_packet(self, packet: FromHead, fds: Sequence[int]) -> None:
        match packet:
            case InstancesKnown():
                self._expected, self._offers = packet.roles, packet.offers
            case ReplaceWorker():
                if self._launcher is not None:
                    self._launcher.expect_return(packet.instance_id, packet.from_disk)
            case UpgradeWanted():
                if self._upgrade is None or self._upgrade.done():
                    self._upgrade = asyncio.create_task(self._prepare_upgrade())
            case HeadLoaded():
                pass  # only the code that prepares an upgrade waits for this packet
            case KillWorker():
                if self._launcher is not None:
                    self._launcher.kill(packet.instance_id)
            case HeadPrepared():
                self._prepared = packet
                if self._launch and self._launcher is None:
                    self._start_workers(packet)
            case HeadUp():
                self._was_up = True
                if self._launcher is not None:
                    self._launcher.note_started()
                if self._head.packets is not None:
                    self._fronts.start(self._head.packets)
            case HeadFailed():
                self._on_failed(packet.message)
            case HeadEnding():
                if self._launcher is not None:
                    self._launcher.expect_end()

    def _on_failed(self, message: str) -> None:
        if self._was_up:
            log.error("%s", message)
        else:
            self._fatal = self._fatal or message

    def _start_workers(self, prepared: HeadPrepared) -> None:
        self._launcher = self._new_launcher(prepared)
        self._launcher.start()
        self._watch_keepers(self._launcher)
        self._discover(self._launcher)

    def _discover(self, launcher: LocalLauncher) -> None:
        """Starts and stops the workers of vLLM servers as the sources list them."""
        sources = self._config.vllm.endpoints
        if not sources:
            return
        # These modules import HTTP and DNS clients, for which each start would wait.
        from moonpool.discovery.endpoint import endpoint_of
        from moonpool.discovery.watch import Discovery

        discovery = Discovery(
            sources,
            lambda server: launcher.add(server.name, server.role, server.place),
            lambda server: launcher.drain(server.name),
        )
        servers = [endpoint_of(name, *of) for name, of in launcher.listed.items()]
        discovery.membership.adopt(servers, time.monotonic())
        self._discovery = asyncio.create_task(discovery.run())

    def _watch_keepers(self, launcher: LocalLauncher) -> None:
        for keeper in launcher.keepers:
            keeper.add_done_callback(self._on_given_up)

    def _new_launcher(self, prepared: HeadPrepared) -> LocalLauncher:
        launcher = LocalLauncher(
            self._config,
            self._control.getsockname()[1],
            self._secret,
            prepared.threads,
            [CoreShare(engine, others) for engine, others in prepared.cores],
            self._fork_server,
        )
        launcher.on_crash = self._on_crash
        return launcher

    def _on_crash(self, instance_id: str) -> None:
        if self._head.packets is not None:
            self._head.packets.send(WorkerCrashed(instance_id=InstanceId(instance_id)))

    def _on_given_up(self, keeper: asyncio.Task[None]) -> None:
        """Handles a worker that has ended for good, which is right only once the cluster is up."""
        if self._was_up or keeper.cancelled() or self._launcher is None or self._launcher.is_ending:
            return
        error = keeper.exception()
        text = f"cannot start a worker: {error}" if error else "a worker ended too often"
        self._fatal = self._fatal or f"{text}; see the log above"
        self._head.kill()

    # An upgrade: starts the next program of this process, and the next head

    def _environment(self) -> dict[str, str]:
        return os.environ | worker_environment(self._secret, self._config.engine.threads or 1)

    async def _prepare_upgrade(self) -> None:
        """Loads the next head and tries the next program; then tells the present head to hand
        over."""
        head, packets = self._head.process, self._head.packets
        assert head is not None and packets is not None
        try:
            found = await load_head(self._environment(), self._config.engine.kind != "vllm")
            try:
                await try_state(self._leave(found))
            except SuccessionError:
                found.end()
                raise
        except SuccessionError as error:
            log.error("the upgrade is called off: %s", error)
            packets.send(UpgradeFailed(message=str(error)))
            return
        self._next_head = found
        await self._fronts.hand_over()
        packets.send(HandOver())
        await asyncio.sleep(self._config.api.drain_seconds + FINISH_S)
        if head is self._head.process:
            self._head.held.culprits.spare()
            self._head.kill()

    async def _succeed(self, head: NextHead) -> None:
        """Becomes the next program. Returns only if the succession fails."""
        log.info("the code on disk takes over, and goes on with %d answers", self._num_answers)
        if self._upgrade is not None:
            self._upgrade.cancel()
        if self._fork_server is not None:
            await self._fork_server.close()
            self._fork_server = None
        try:
            become_next(self._leave(head))
        except OSError as error:
            log.error("the upgrade is called off: cannot start %s: %s", sys.executable, error)
        self._next_head = None
        self._fronts.go_on()
        head.end()

    def _leave(self, head: NextHead) -> SupervisorState:
        """Returns what the next program gets."""
        launcher, held = self._launcher, self._head.held.leave()
        return SupervisorState(
            title=setproctitle.getproctitle(),
            config=self._config,
            secret=self._secret,
            launch=self._launch,
            http=self._http.fileno(),
            control=self._control.fileno(),
            **msgspec.structs.asdict(held),
            expected=self._expected,
            num_restarts=self._num_restarts,
            num_upgrades=self._num_upgrades + 1,
            head_pid=head.process.pid,
            head_fd=head.packets.fileno(),
            prepared=self._prepared,
            workers={} if launcher is None else launcher.workers(),
            memory={} if launcher is None else launcher.memory(),
            epoch=self._epoch,
            offers=self._offers,
            listed={} if launcher is None else launcher.listed,
            fronts=self._fronts.leave(),
        )

    def _adopt(self, state: SupervisorState) -> None:
        """Continues with the state that an earlier program of this process has left."""
        self._expected, self._offers = state.expected, state.offers
        self._num_restarts, self._num_upgrades = state.num_restarts, state.num_upgrades
        self._prepared, self._epoch = state.prepared, state.epoch
        self._was_up = True
        if state.launch and state.prepared is not None:
            self._launcher = self._new_launcher(state.prepared)
            self._launcher.adopt(state.workers, state.memory)
            self._watch_keepers(self._launcher)
            for name, (role, place) in state.listed.items():
                self._launcher.add(name, role, place)
            self._discover(self._launcher)

    # Methods about the head's health, and the end

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            self._clock.tick(time.monotonic())
            self._fronts.watch(self._clock.listened_s)
            self._head.watch(self._clock.listened_s)

    async def _look(self) -> None:
        """Replaces workers that a signal has stopped, and a stopped head that has no TLS
        connections, which would end with it."""
        notice = StopNotice()
        while True:
            await notice.wait(self._stopped.any_stopped)
            workers = {} if self._launcher is None else self._launcher.workers()
            watched = {pid: name for name, pid in workers.items() if pid}
            serving: dict[int, ServingProcess] = {}
            if not self._config.api.ssl_certfile:
                serving = self._fronts.running()
                if self._head.process is not None and self._head.is_heard:
                    serving[self._head.process.pid] = self._head
            watched.update(dict.fromkeys(serving, ""))
            for pid in self._stopped.look(watched):
                if pid in serving:
                    serving[pid].kill_stopped()
                elif self._launcher is not None:
                    self._launcher.kill(watched[pid], "is stopped by a signal (SIGSTOP)")

    async def _end(self) -> None:
        if self._upgrade is not None:
            self._upgrade.cancel()
        if self._next_head is not None:
            self._next_head.end()
        if self._discovery is not None:
            self._discovery.cancel()
        if self._launcher is not None:
            await self._launcher.stop()
        if self._fork_server is not None:
            await self._fork_server.close()
        self._head.held.close()
        self._http.close()
        self._control.close()


def _raise_file_limit(num_fronts: int) -> None:
    """Raises the limit of open files: each answer takes two descriptors, and two more while the
    next head gets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_FILES * num_fronts
    wanted = most if hard == resource.RLIM_INFINITY else min(hard, most)
    if soft < wanted:
        with contextlib.suppress(ValueError):  # macOS has a limit that `hard` does not tell
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
