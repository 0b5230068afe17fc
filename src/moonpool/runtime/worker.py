"""One instance's process: performs what its state machine decides.

The event loop owns the state machine and the control connection; the engine computes in a thread
of its own, and the messenger moves blocks in its threads. All of them post events to the loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading

import msgspec

from moonpool.config import Degree
from moonpool.engine.stages.pipeline import PipelineEngine
from moonpool.messenger.messenger import Messenger
from moonpool.runtime.cores import CoreShare
from moonpool.runtime.engine_thread import EngineThread
from moonpool.runtime.head_link import HeadChannel, HeadLink, HungError, WorkerError
from moonpool.runtime.instance_boot import BootedInstance, BootError, boot_instance
from moonpool.runtime.layer_gates import LayerGates
from moonpool.runtime.leaving import Leaving
from moonpool.runtime.offload import Event, Offload
from moonpool.runtime.pipeline_thread import PipelineThread
from moonpool.runtime.protocol import (
    HEARTBEAT_S,
    Apply,
    AttentionMoved,
    Failed,
    Joined,
    Setup,
    WorkFrame,
)
from moonpool.runtime.settle import settle_memory
from moonpool.runtime.step_watch import OFFLOADED_PATIENCE_S, PATIENCE_S, StepWatch
from moonpool.runtime.transfers import perform_storage, perform_transfer
from moonpool.types import InstanceId, Role
from moonpool.workers.actions import (
    Depart,
    ForgetStored,
    LoadBlocks,
    LookUpBlocks,
    RunStep,
    StepEnded,
    StepFailed,
    StopRepeating,
    StoreBlocks,
    Tell,
    WorkerAction,
    WorkerEvent,
)
from moonpool.workers.instance import Instance
from moonpool.workers.messages import BlocksChanged, Report

log = logging.getLogger("moonpool.worker")

END_S = 15.0
"""How long a worker whose engine hangs may take to end in order."""


class Worker:
    """Connects to the head, boots the instance it is told to be, and serves until told to stop."""

    def __init__(
        self,
        role: Role,
        instance_id: InstanceId,
        machine: str,
        listen_host: str | None,
        secret: bytes,
        share: CoreShare,
        num_stages: int | None = None,
        num_ranks: int | None = None,
    ) -> None:
        """`num_stages`, `num_ranks`: other than the head's configuration has it for the role."""
        self.role = role
        self._num_stages = num_stages
        self._num_ranks = num_ranks
        self._share = share
        self.instance_id = instance_id
        self._machine = machine
        self._listen_host = listen_host
        self._secret = secret
        self._link = HeadLink(instance_id, secret, self)
        self._booted: BootedInstance | None = None
        self._setup: Setup | None = None
        self._engine: EngineThread | PipelineThread | None = None
        self._watch: StepWatch | None = None
        self._hung = False
        self._gates = LayerGates()
        self._loop = asyncio.get_running_loop()
        self._joining: asyncio.Task[None] | None = None
        self._boot_lock = asyncio.Lock()
        self._joined = False  # over the connection there is now
        self._leaving = Leaving()

    def ask_to_leave(self, within_s: float) -> bool:
        """Has the head drain this instance, which ends `run`. False if there is no head to ask."""
        if not self._joined:
            return False
        self._leaving.begin(within_s, self._link)
        return True

    async def run(self, head_host: str, head_port: int, reconnect: bool) -> None:
        """Serves until the head says stop. Raises WorkerError."""
        heartbeat = asyncio.create_task(self._beat())
        try:
            await self._link.run(head_host, head_port, reconnect)
        except WorkerError as error:
            if self._hung:
                raise HungError(str(error)) from None
            raise
        finally:
            heartbeat.cancel()
            self._close()

    # Follower of the link

    def on_head(self) -> None:
        if self._listen_host is None:
            self._listen_host = self._link.local_host
        role = self.role if self._booted is None else self._booted.instance.role
        crew: tuple[str, ...] = ()
        if self._booted is not None and isinstance(self._booted.messenger, Offload):
            crew = self._booted.messenger.names
        self._link.send(Apply(role=role, host=self._machine, pid=os.getpid(), attention=crew))

    def on_frame(self, frame: WorkFrame) -> None:
        match frame:
            case Setup():
                self._joining = asyncio.create_task(self._join(frame, self._link.channel))
            case AttentionMoved():
                if self._booted is not None and isinstance(self._booted.messenger, Offload):
                    self._booted.messenger.move(frame.place, frame.address)
            case _:
                self._post(frame)

    def on_lost(self) -> None:
        self._joined = False
        if self._leaving.overdue:
            self._link.stop("it leaves")
        elif self._booted is not None:
            self._perform(self._booted.instance.abort_all())

    async def _join(self, setup: Setup, channel: HeadChannel | None) -> None:
        """Boots on the first setup; a head that came back must want the same instance."""
        async with self._boot_lock:  # the head may be lost and found again while we boot
            if self._link.fatal:
                return
            if setup.engine.kind != "moonpool":
                self._fail("the head's instances are vLLMs: start this worker with --vllm URL")
                return
            if self._booted is None:
                booted = await self._boot(setup)
                if booted is None:
                    return
                self._start(booted, setup)
            elif msgspec.structs.replace(setup, attention=()) != self._setup:
                self._fail("the head came back with another configuration; start this worker anew")
                return
        assert self._booted is not None
        if channel is not None and channel is self._link.channel:
            self._link.send(Joined(info=self._booted.info(self._machine, os.getpid())))
            self._joined = True
            self._leaving.tell(self._link)

    async def _boot(self, setup: Setup) -> BootedInstance | None:
        """None after a failure that the head was told."""
        assert self._listen_host is not None
        try:
            return await asyncio.to_thread(
                boot_instance,
                setup,
                self.role,
                self.instance_id,
                self._listen_host,
                self._secret,
                self._from_thread,
                self._degree(setup),
                self._on_stage_lost,
                self._share,
            )
        except BootError as error:
            self._fail(str(error))
        except Exception as error:
            log.exception("the instance could not be brought up")
            self._fail(f"an unexpected {type(error).__name__}: {error}")
        return None

    def _degree(self, setup: Setup) -> Degree:
        usual = setup.engine.degree(self.role)
        return Degree(self._num_stages or usual.num_stages, self._num_ranks or usual.num_ranks)

    def _start(self, booted: BootedInstance, setup: Setup) -> None:
        # Its attention workers may be others by the time a head comes back.
        self._setup = msgspec.structs.replace(setup, attention=())
        eos, threads, post = booted.eos_token_ids, booted.threads, self._from_thread
        engine, messenger = booted.engine, booted.messenger
        if isinstance(engine, PipelineEngine):
            assert isinstance(messenger, Messenger), "stages have an arena of their own"
            self._engine = PipelineThread(engine, messenger, eos, threads, post)
        else:
            cores = self._share.engine if booted.ranks is None else booted.ranks.cores
            self._engine = EngineThread(engine, messenger, eos, threads, post, cores)
        self._engine.start()
        patience_s = OFFLOADED_PATIENCE_S if isinstance(messenger, Offload) else PATIENCE_S
        num_stages = booted.instance.config.micro_batches
        self._watch = StepWatch(booted.cost, num_stages, patience_s)
        self._booted = booted
        settle_memory()

    def _fail(self, message: str) -> None:
        """Tells the head, and ends this worker."""
        self._link.send(Failed(message=message))
        self._link.fail(message, "it cannot start")

    def _on_stage_lost(self, message: str) -> None:
        """From any thread: an instance without one of its stages or ranks is no instance."""

        def end() -> None:
            if not self._link.stopping:
                self._link.fail(f"{message}; the instance ends with it", "a part is lost")

        try:
            self._loop.call_soon_threadsafe(end)
        except RuntimeError:
            return  # the loop has closed: the process is ending

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._booted is not None and self._link.channel is not None:
                self._link.send(self._booted.load())
            # By beats, not by the clock: if all of this process stood still, nothing hangs in it.
            hangs = self._watch.wait(HEARTBEAT_S) if self._watch is not None else None
            if hangs is not None:
                self._on_hang(hangs)
                return

    def _on_hang(self, message: str) -> None:
        """Its works go on elsewhere at once, and this process ends by a deadline."""
        log.error("%s", message)
        self._hung = True
        last_resort = threading.Timer(END_S, os._exit, (1,))
        last_resort.daemon = True
        last_resort.start()
        self._link.fail(f"{message}; the instance ends", "its engine hangs")

    # Events in, actions out

    def _from_thread(self, event: Event | StepEnded | StepFailed) -> None:
        """Posts from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._post, event)
        except RuntimeError:
            return  # the loop has closed: the process is ending

    def _post(self, event: WorkerEvent) -> None:
        if self._booted is None:
            return
        if isinstance(event, StepEnded | StepFailed) and self._watch is not None:
            self._watch.end()
        self._perform(self._booted.instance.handle(event, self._loop.time()))
        self._gates.note(event)

    def _perform(self, actions: list[WorkerAction]) -> None:
        booted = self._booted
        assert booted is not None
        assert self._engine is not None
        for action in actions:
            match action:
                case Tell() | Depart() | StopRepeating():  # steps are never repeated here
                    continue
                case RunStep():
                    assert self._watch is not None
                    self._watch.begin(action)
                    self._engine.submit(action, self._gates.of_step(action))
                case StoreBlocks() | LoadBlocks() | LookUpBlocks() | ForgetStored():
                    assert booted.store is not None, "an instance without slots asks for none"
                    self._engine.before_transfer(action)
                    perform_storage(booted.store, action, self._gates)
                case _:
                    self._engine.before_transfer(action)
                    layers = booted.layout.num_layers
                    perform_transfer(booted.messenger, layers, action, self._gates)
        # Last, so that the engine computes the next step while the tokens of this one are sent.
        reports = [action.report for action in actions if isinstance(action, Tell)]
        if isinstance(booted.messenger, Offload):
            self._name_blocks(booted.messenger, booted.instance, reports)
        if reports:
            self._link.send(*reports)
        if any(isinstance(action, Depart) for action in actions):
            self._link.stop("it leaves")

    def _name_blocks(self, offload: Offload, instance: Instance, reports: list[Report]) -> None:
        """Tells who keeps the blocks what is in them."""
        for report in reports:
            if isinstance(report, BlocksChanged):
                found = [(instance.pool.find(key), key) for key in report.stored]
                offload.name([(block, key) for block, key in found if block is not None])

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.stop(timeout_s=5.0)
        if self._booted is not None:
            self._booted.close()
