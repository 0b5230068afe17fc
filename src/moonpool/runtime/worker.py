"""One instance's process: performs what its state machine decides.

The event loop owns the state machine and the control connection; the engine computes in a thread
of its own, and the messenger moves blocks in its threads. All of them post events to the loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time

import msgspec

from moonpool.engine.stages.pipeline import PipelineEngine
from moonpool.messenger.auth import ClientHandshake, Identity
from moonpool.messenger.messenger import Messenger
from moonpool.runtime.channel import Channel
from moonpool.runtime.cores import CoreShare
from moonpool.runtime.engine_thread import EngineThread
from moonpool.runtime.instance_boot import BootedInstance, BootError, boot_instance
from moonpool.runtime.layer_gates import LayerGates
from moonpool.runtime.offload import Event, Offload
from moonpool.runtime.pipeline_thread import PipelineThread
from moonpool.runtime.protocol import (
    CONTROL_SERVICE,
    HEARTBEAT_S,
    Apply,
    AttentionMoved,
    DownFrame,
    Failed,
    Joined,
    Setup,
    Stop,
    TurnedAway,
    UpFrame,
)
from moonpool.runtime.settle import settle_memory
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
from moonpool.workers.messages import BlocksChanged, Report, WantsToLeave

log = logging.getLogger("moonpool.worker")

RECONNECT_S = 60.0
"""How long a worker seeks a lost head before it ends itself."""

HeadChannel = Channel[DownFrame, UpFrame]


class WorkerError(Exception):
    """The worker cannot go on; one line for the person who started it."""


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
    ) -> None:
        """`num_stages`: other than the head's configuration has it for the role."""
        self.role = role
        self._num_stages = num_stages
        self._share = share
        self.instance_id = instance_id
        self._machine = machine
        self._listen_host = listen_host
        self._secret = secret
        self._booted: BootedInstance | None = None
        self._setup: Setup | None = None
        self._engine: EngineThread | PipelineThread | None = None
        self._gates = LayerGates()
        self._channel: HeadChannel | None = None
        self._loop = asyncio.get_running_loop()
        self._closed: asyncio.Future[str] = self._loop.create_future()
        self._joining: asyncio.Task[None] | None = None
        self._boot_lock = asyncio.Lock()
        self._fatal = ""
        self._joined = False  # over the connection there is now
        self._stopping = False
        self._leaves_at_s: float | None = None

    def ask_to_leave(self, within_s: float) -> bool:
        """Has the head drain this instance, which ends `run`. False if there is no head to ask."""
        if self._channel is None or not self._joined:
            return False
        self._leaves_at_s = time.monotonic() + within_s
        self._say_it_leaves()
        return True

    def _say_it_leaves(self) -> None:
        assert self._leaves_at_s is not None and self._channel is not None
        within_s = max(self._leaves_at_s - time.monotonic(), 0.0)
        self._channel.send(WantsToLeave(within_s=within_s))

    async def run(self, head_host: str, head_port: int, reconnect: bool) -> None:
        """Serves until Stop. Raises WorkerError."""
        lost_s: float | None = None
        try:
            while not self._stopping:
                served, reason = await self._serve_once(head_host, head_port)
                if self._stopping:
                    return
                if self._fatal:
                    raise WorkerError(self._fatal)
                if self._leaves_at_s is not None and time.monotonic() > self._leaves_at_s:
                    return
                log.warning("no connection to the head at %s:%d: %s", head_host, head_port, reason)
                self._give_up_works()
                now_s = time.monotonic()
                lost_s = now_s if served or lost_s is None else lost_s
                if not reconnect or now_s - lost_s > RECONNECT_S:
                    raise WorkerError(f"the head at {head_host}:{head_port} is gone: {reason}")
                await asyncio.sleep(1.0)
        finally:
            self._close()

    async def _serve_once(self, head_host: str, head_port: int) -> tuple[bool, str]:
        """One connection from begin to end: whether the head was there, and why it ended."""
        me = Identity(instance_id=self.instance_id, service=CONTROL_SERVICE, fingerprint=b"")
        handshake = ClientHandshake(self._secret, me)
        self._closed = self._loop.create_future()
        channel: HeadChannel = Channel(handshake, msgspec.msgpack.Decoder(DownFrame), self)
        self._channel = channel
        heartbeat = asyncio.create_task(self._beat())
        try:
            await self._loop.create_connection(lambda: channel, head_host, head_port)
            return True, await self._closed
        except OSError as error:
            return False, str(error)
        finally:
            heartbeat.cancel()
            self._joined = False
            channel.close()
            self._channel = None

    # Listener of the channel

    def on_open(self, peer: Identity) -> None:
        assert self._channel is not None
        if self._listen_host is None:
            self._listen_host = self._channel.local_host
        role = self.role if self._booted is None else self._booted.instance.role
        crew: tuple[str, ...] = ()
        if self._booted is not None and isinstance(self._booted.messenger, Offload):
            crew = self._booted.messenger.names
        apply = Apply(role=role, host=self._machine, pid=os.getpid(), attention=crew)
        self._channel.send(apply)

    def on_frame(self, frame: DownFrame) -> None:
        match frame:
            case Setup():
                self._joining = asyncio.create_task(self._join(frame, self._channel))
            case Stop():
                self._stopping = True
                self._hang_up("the head stops")
            case TurnedAway():
                self._fatal = f"the head turned this instance away: {frame.message}"
                self._hang_up("turned away")
            case AttentionMoved():
                if self._booted is not None and isinstance(self._booted.messenger, Offload):
                    self._booted.messenger.move(frame.place, frame.address)
            case _:
                self._post(frame)

    def on_closed(self, reason: str) -> None:
        if self._channel is not None and self._channel.refused:
            self._fatal = f"the head and this worker do not agree: {reason}"
        if not self._closed.done():
            self._closed.set_result(reason)

    def _hang_up(self, reason: str) -> None:
        if self._channel is not None:
            self._channel.close(reason)

    async def _join(self, setup: Setup, channel: HeadChannel | None) -> None:
        """Boots on the first setup; a head that came back must want the same instance."""
        async with self._boot_lock:  # the head may be lost and found again while we boot
            if self._fatal:
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
        if channel is not None and channel is self._channel:
            channel.send(Joined(info=self._booted.info(self._machine, os.getpid())))
            self._joined = True
            if self._leaves_at_s is not None:
                self._say_it_leaves()

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
                self._num_stages or setup.engine.num_stages(self.role),
                self._on_stage_lost,
                self._share,
            )
        except BootError as error:
            self._fail(str(error))
        except Exception as error:
            log.exception("the instance could not be brought up")
            self._fail(f"an unexpected {type(error).__name__}: {error}")
        return None

    def _start(self, booted: BootedInstance, setup: Setup) -> None:
        # Its attention workers may be others by the time a head comes back.
        self._setup = msgspec.structs.replace(setup, attention=())
        eos, threads, post = booted.eos_token_ids, booted.threads, self._from_thread
        engine, messenger = booted.engine, booted.messenger
        if isinstance(engine, PipelineEngine):
            assert isinstance(messenger, Messenger), "stages have an arena of their own"
            self._engine = PipelineThread(engine, messenger, eos, threads, post)
        else:
            self._engine = EngineThread(engine, messenger, eos, threads, post, self._share.engine)
        self._engine.start()
        self._booted = booted
        settle_memory()

    def _fail(self, message: str) -> None:
        """Tells the head, and ends this worker."""
        self._fatal = message
        if self._channel is not None:
            self._channel.send(Failed(message=message))
        self._hang_up("it cannot start")

    def _on_stage_lost(self, message: str) -> None:
        """From any thread: an instance without one of its stages is no instance."""

        def end() -> None:
            if not self._stopping:
                self._fatal = f"{message}; the instance ends with it"
                self._hang_up("a stage is lost")

        try:
            self._loop.call_soon_threadsafe(end)
        except RuntimeError:
            return  # the loop has closed: the process is ending

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._booted is not None and self._channel is not None:
                self._channel.send(self._booted.load())

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
        self._perform(self._booted.instance.handle(event, self._loop.time()))
        self._gates.note(event)

    def _give_up_works(self) -> None:
        if self._booted is not None:
            self._perform(self._booted.instance.abort_all())

    def _perform(self, actions: list[WorkerAction]) -> None:
        booted = self._booted
        assert booted is not None
        assert self._engine is not None
        for action in actions:
            match action:
                case Tell() | Depart() | StopRepeating():  # steps are never repeated here
                    continue
                case RunStep():
                    self._engine.submit(action, self._gates.of_step(action))
                case StoreBlocks() | LoadBlocks() | LookUpBlocks() | ForgetStored():
                    assert booted.store is not None, "an instance without slots asks for none"
                    self._engine.before_transfer(action)
                    perform_storage(booted.store, action)
                case _:
                    self._engine.before_transfer(action)
                    layers = booted.layout.num_layers
                    perform_transfer(booted.messenger, layers, action, self._gates)
        # Last, so that the engine computes the next step while the tokens of this one are sent.
        reports = [action.report for action in actions if isinstance(action, Tell)]
        if isinstance(booted.messenger, Offload):
            self._name_blocks(booted.messenger, booted.instance, reports)
        if reports and self._channel is not None:
            self._channel.send(*reports)
        if any(isinstance(action, Depart) for action in actions):
            self._stopping = True
            self._hang_up("it leaves")

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
