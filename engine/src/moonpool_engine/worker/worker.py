"""One instance's process: performs the decisions of its state machine.

The event loop owns the state machine and the control connection. The engine computes in its own
thread, and the messenger moves blocks in its threads. All of these threads post events to the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import threading

import msgspec

from moonpool.children.stopped import LOOK_S, QUIET_LOOK_S, StoppedProcesses
from moonpool.config.tables import ParallelConfig
from moonpool.gc_tuning import settle_memory
from moonpool.link.head_link import HeadChannel, HungError, InstanceProcess, WorkerError
from moonpool.link.idle_backoff import IdleBackoff
from moonpool.plugins.workers import WorkerSettings
from moonpool.protocol.frames import (
    HEARTBEAT_S,
    QUIET_HEARTBEAT_S,
    Apply,
    AttentionMoved,
    Joined,
    Setup,
    WorkFrame,
)
from moonpool.protocol.messages import BlocksChanged, Report
from moonpool.protocol.supervision import HUNG_STATUS
from moonpool.scheduler.actions import (
    ExitProcess,
    RunStep,
    SendReport,
    StepEnded,
    StepFailed,
    StopRepeating,
    WorkerAction,
    WorkerEvent,
)
from moonpool.scheduler.instance import Instance, InstanceDriver, Performers
from moonpool_engine.attention_offload.remote_messenger import Event, RemoteAttentionMessenger
from moonpool_engine.engine.gguf.shared_weights import SharedWeights
from moonpool_engine.engine.parallel.pipeline import PipelineEngine
from moonpool_engine.transfer.local_peer import LocalPeer
from moonpool_engine.worker.engine_boot import BootError, InstancePlace
from moonpool_engine.worker.engine_thread import (
    OFFLOADED_PATIENCE_S,
    PATIENCE_S,
    DomainNotice,
    EngineThread,
    LayerGates,
    PipelineThread,
    StepWatchdog,
)
from moonpool_engine.worker.instance_boot import BootedInstance, boot_instance
from moonpool_engine.worker.transfers import storage_by, transfers_by

log = logging.getLogger("moonpool.worker")

END_S = 15.0
"""How long a worker with a hanging engine may take for an orderly end."""


class Worker(InstanceProcess):
    """Connects to the head, boots the instance that the head configures, and serves it."""

    def __init__(self, settings: WorkerSettings) -> None:
        assert settings.role is not None, "an attention worker is of another kind"
        super().__init__(
            settings.role, settings.name, settings.machine, settings.secret, settings.tls
        )
        self._settings = settings
        self._listen_host = settings.host
        self._booted: BootedInstance | None = None
        self._driver: InstanceDriver | None = None
        self._setup: Setup | None = None
        self._engine: EngineThread | PipelineThread | None = None
        self._watch: StepWatchdog | None = None
        self._stopped = StoppedProcesses()
        self._heartbeat_timer = IdleBackoff(HEARTBEAT_S, HEARTBEAT_S, QUIET_HEARTBEAT_S)
        self._stopped_process_timer = IdleBackoff(LOOK_S, LOOK_S, QUIET_LOOK_S)
        self._domain_notice = DomainNotice(None)
        self._hung = False
        self._gates = LayerGates()
        self._joining: asyncio.Task[None] | None = None
        self._boot_lock = asyncio.Lock()

    async def run(self, head_host: str, head_port: int) -> None:
        """Serves until the head stops this worker. Raises WorkerError: a HungError if the engine's
        thread hangs."""
        heartbeat = asyncio.create_task(self._beat())
        looks = asyncio.create_task(self._end_stopped_parts())
        try:
            await self._link.run(head_host, head_port)
        except WorkerError as error:
            if self._hung:
                raise HungError(str(error)) from None
            raise
        finally:
            heartbeat.cancel()
            looks.cancel()
            self._close()

    # Methods by which it follows the link

    def on_head(self) -> None:
        if self._listen_host is None:
            self._listen_host = self._link.local_host
        role = self.role if self._booted is None else self._booted.instance.role
        offload = None if self._booted is None else self._booted.offload
        group = () if offload is None else offload.names
        self._link.send(Apply(role=role, host=self._machine, pid=os.getpid(), attention=group))

    def on_frame(self, frame: WorkFrame) -> None:
        match frame:
            case Setup():
                self._joining = asyncio.create_task(self._join(frame, self._link.channel))
            case AttentionMoved():
                if self._booted is not None and self._booted.offload is not None:
                    self._booted.offload.move(frame.place, frame.address)
            case _:
                self._routes.note(frame)
                self._post(frame)

    def _abort_all(self) -> None:
        if self._booted is not None:
            self._perform(self._booted.instance.abort_all())

    async def _join(self, setup: Setup, channel: HeadChannel | None) -> None:
        """Boots on the first setup. A head that comes back must send the same setup."""
        async with self._boot_lock:  # the head may be lost and found again during the boot
            if self._link.fatal:
                return
            if setup.engine.kind != "moonpool":
                self._fail("the head serves with vLLM; start this worker with --vllm URL")
                return
            if self._booted is None:
                booted = await self._boot(setup)
                if booted is None:
                    return
                self._start(booted, setup)
            elif self._setup is None or _shared(setup) != _shared(self._setup):
                self._fail("the head came back with another configuration; restart this worker")
                return
        assert self._booted is not None
        self._join_over(channel, Joined(info=self._booted.info(self._machine, os.getpid())))
        self._heartbeat_timer.note()
        self._stopped_process_timer.note()

    async def _boot(self, setup: Setup) -> BootedInstance | None:
        """Boots the instance in a thread. Returns None after a failure, reported to the head."""
        try:
            return await asyncio.to_thread(
                boot_instance,
                setup,
                self._place(setup),
                self._from_thread,
                self._on_stage_lost,
            )
        except BootError as error:
            self._fail(str(error))
        except Exception as error:
            log.exception("the instance failed to start")
            self._fail(f"unexpected {type(error).__name__}: {error}; its log has the details")
        return None

    def _place(self, setup: Setup) -> InstancePlace:
        assert self._listen_host is not None
        settings, usual = self._settings, setup.engine.degree(self.role)
        degree = ParallelConfig(
            settings.num_stages or usual.num_stages, settings.num_ranks or usual.num_ranks
        )
        shm, shared = setup.network.use_shared_memory, settings.shared
        assert shared is None or isinstance(shared, SharedWeights)
        peer = LocalPeer(self.instance_id, self._secret, self._listen_host, self._tls, shm)
        return InstancePlace(peer, self.role, degree, settings.share, settings.kept, shared)

    def _start(self, booted: BootedInstance, setup: Setup) -> None:
        self._setup = setup
        built, post = booted.built, self._from_thread
        engine, messenger, threads = built.engine, booted.messenger, built.threads
        if isinstance(engine, PipelineEngine):
            self._engine = PipelineThread(engine, messenger, threads, post, booted.drafter)
        else:
            cores = self._settings.share.engine if built.ranks is None else built.ranks.cores
            self._engine = EngineThread(engine, messenger, threads, post, cores, booted.drafter)
        self._engine.start()
        patience_s = PATIENCE_S if booted.offload is None else OFFLOADED_PATIENCE_S
        num_stages = booted.instance.config.micro_batches
        self._watch = StepWatchdog(booted.cost, num_stages, patience_s)
        self._domain_notice = DomainNotice(booted.cost.domain)
        self._driver = self._drive(booted)
        self._booted = booted
        settle_memory()

    def _on_stage_lost(self, message: str) -> None:
        """Ends the instance, from any thread, because one of its stages or ranks is lost."""

        def end() -> None:
            if not self._link.stopping:
                self._link.fail(f"{message}; the instance ends with it", "a part is lost")

        try:
            self._loop.call_soon_threadsafe(end)
        except RuntimeError:
            return  # the loop has closed, because the process is ending

    async def _beat(self) -> None:
        while True:
            await self._heartbeat_timer.next(self._watch is not None and self._watch.is_waiting)
            if self._booted is not None and self._link.channel is not None:
                self._link.send(self._booted.load())
            # Counted in beats, not by the clock: a suspended process has no hanging engine.
            hangs = self._watch.wait(HEARTBEAT_S) if self._watch is not None else None
            if hangs is not None:
                self._on_hang(hangs)
                return

    async def _end_stopped_parts(self) -> None:
        """Kills stages and ranks that a signal has stopped, with which the instance ends."""
        # most instances have no further processes
        while self._booted is None or self._booted.part_pids:
            in_step = self._watch is not None and self._watch.is_waiting
            await self._stopped_process_timer.next(in_step or self._stopped.any_stopped)
            parts = [] if self._booted is None else self._booted.part_pids
            for pid in self._stopped.look(parts):
                log.error("process %d of this instance is stopped by a signal; killing it", pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _on_hang(self, message: str) -> None:
        """Ends the process within `END_S`. The head moves the requests of the instance elsewhere at
        once."""
        log.error("%s", message)
        self._hung = True
        last_resort = threading.Timer(END_S, os._exit, (HUNG_STATUS,))
        last_resort.daemon = True
        last_resort.start()
        self._link.fail(f"{message}; the instance ends", "its engine hangs")

    # Events in, actions out

    def _from_thread(self, event: Event | StepEnded | StepFailed) -> None:
        """Posts an event from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._post, event)
        except RuntimeError:
            return  # the loop has closed, because the process is ending

    def _post(self, event: WorkerEvent) -> None:
        if self._booted is None:
            return
        self._heartbeat_timer.note()
        self._stopped_process_timer.note()
        if isinstance(event, StepEnded | StepFailed) and self._watch is not None:
            self._watch.end()
        instance = self._booted.instance
        had_steps, had_requests = instance.has_steps, bool(instance.requests)
        actions = instance.handle(event, self._loop.time())
        if had_steps > instance.has_steps or had_requests > bool(instance.requests):
            # Sent in one write with the last tokens; otherwise gauges and counters would be late by
            # one heartbeat.
            actions.append(SendReport(self._booted.load()))
        self._perform(actions)
        self._gates.note(event)

    def _perform(self, actions: list[WorkerAction]) -> None:
        booted = self._booted
        assert booted is not None
        arena, ledger = booted.built.arena, booted.built.ledger
        if ledger is not None:  # noted before any action can overwrite a block
            ledger.note(booted.instance.pool.take_rekeyed())
        if arena.is_late:
            arena.reach(booted.instance.pool.num_ever_used)
        assert self._driver is not None
        self._driver.perform(actions)
        # Reports go last, so that the next step is computed while the tokens are sent.
        reports = [action.report for action in actions if isinstance(action, SendReport)]
        if booted.offload is not None:
            self._name_blocks(booted.offload, booted.instance, reports)
        if reports:
            self._routes.report(reports)
        if any(isinstance(action, ExitProcess) for action in actions):
            self._link.send(booted.load())  # the counters since the last heartbeat
            self._link.stop("it leaves")

    def _drive(self, booted: BootedInstance) -> InstanceDriver:
        """Returns the driver, with the performer of each action."""
        num_layers, store = booted.built.arena.layout.num_layers, booted.tier.store
        moves = {**transfers_by(booted.messenger, num_layers, self._gates)}
        if store is not None:  # an instance without SSD blocks has no such actions
            moves |= storage_by(store, self._gates)

        def move(action: WorkerAction) -> None:
            assert self._engine is not None
            self._engine.before_transfer(action)
            moves[type(action)](action)

        # Reports and the end are for `_perform`, and only the simulator repeats steps.
        elsewhere = dict.fromkeys((SendReport, ExitProcess, StopRepeating), _ignore)
        performers: Performers = {
            **dict.fromkeys(moves, move),
            **elsewhere,
            RunStep: self._run_step,
        }
        return InstanceDriver(booted.instance, self._loop.time, performers)

    def _run_step(self, step: RunStep) -> None:
        assert self._engine is not None
        assert self._watch is not None
        self._watch.begin(step)
        if (notice := self._domain_notice.of(step)) is not None:
            log.info("%s", notice)
        self._engine.submit(step, self._gates.of_step(step))

    def _name_blocks(
        self, offload: RemoteAttentionMessenger, instance: Instance, reports: list[Report]
    ) -> None:
        """Reports the keys of new blocks to the attention workers that have them."""
        for report in reports:
            if isinstance(report, BlocksChanged):
                found = [(instance.pool.find(key), key) for key in report.stored]
                offload.name([(block, key) for block, key in found if block is not None])

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.stop(timeout_s=5.0)
        if self._booted is not None:
            self._booted.close()


def make_worker(settings: WorkerSettings) -> Worker:
    """Makes a worker of the kind "moonpool" (`moonpool.plugins.workers`)."""
    return Worker(settings)


def _ignore(action: WorkerAction) -> None:
    """Does nothing, because the action is performed elsewhere, or never."""


def _shared(setup: Setup) -> Setup:
    """Returns the settings that another head must share with this one. The instance's attention
    workers may have changed, and a standby listens at another address."""
    network = msgspec.structs.replace(setup.network, head_host="", head_port=0)
    return msgspec.structs.replace(setup, attention=(), network=network)
