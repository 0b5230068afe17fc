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

from moonpool.kvcache.transfers import MessengerEvent
from moonpool.messenger.auth import AuthError, ClientHandshake, Identity, authenticate_streams
from moonpool.runtime.channel import Channel, ChannelError
from moonpool.runtime.engine_thread import EngineThread
from moonpool.runtime.instance_boot import BootedInstance, BootError, boot_instance
from moonpool.runtime.protocol import (
    CONTROL_SERVICE,
    HEARTBEAT_S,
    Apply,
    DownFrame,
    Failed,
    Joined,
    Setup,
    Stop,
    TurnedAway,
    UpFrame,
)
from moonpool.types import InstanceId, Role
from moonpool.workers.actions import (
    AbortStream,
    CancelStream,
    ExpectStream,
    FetchBlocks,
    FinishStream,
    GrantRead,
    OpenStream,
    RunStep,
    SendBlocks,
    StepEnded,
    StepFailed,
    Tell,
    WorkerAction,
    WorkerEvent,
)

log = logging.getLogger("moonpool.worker")

HANDSHAKE_S = 10.0
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
    ) -> None:
        self.role = role
        self.instance_id = instance_id
        self._machine = machine
        self._listen_host = listen_host
        self._secret = secret
        self._booted: BootedInstance | None = None
        self._setup: Setup | None = None
        self._engine: EngineThread | None = None
        self._channel: HeadChannel | None = None
        self._loop = asyncio.get_running_loop()
        self._stopping = False

    async def run(self, head_host: str, head_port: int, reconnect: bool) -> None:
        """Serves until Stop. Raises WorkerError."""
        lost_s: float | None = None
        try:
            while not self._stopping:
                try:
                    await self._serve_once(head_host, head_port)
                    lost_s = None
                except (OSError, ChannelError, TimeoutError) as error:
                    log.warning(
                        "no connection to the head at %s:%d: %s", head_host, head_port, error
                    )
                if self._stopping:
                    return
                self._give_up_works()
                lost_s = lost_s if lost_s is not None else time.monotonic()
                if not reconnect or time.monotonic() - lost_s > RECONNECT_S:
                    raise WorkerError(f"the head at {head_host}:{head_port} is gone")
                await asyncio.sleep(1.0)
        finally:
            self._close()

    async def _serve_once(self, head_host: str, head_port: int) -> None:
        reader, writer = await asyncio.open_connection(head_host, head_port)
        me = Identity(instance_id=self.instance_id, service=CONTROL_SERVICE, fingerprint=b"")
        try:
            await authenticate_streams(
                reader, writer, ClientHandshake(self._secret, me), HANDSHAKE_S
            )
        except AuthError as error:
            writer.close()
            raise WorkerError(f"the head at {head_host}:{head_port}: {error}") from None
        if self._listen_host is None:
            self._listen_host = str(writer.get_extra_info("sockname")[0])
        channel: HeadChannel = Channel(reader, writer, msgspec.msgpack.Decoder(DownFrame))
        self._channel = channel
        channel.send(Apply(role=self.role, host=self._machine, pid=os.getpid()))
        heartbeat = asyncio.create_task(self._beat())
        try:
            async for frame in channel.frames():
                match frame:
                    case Setup():
                        await self._join(frame, channel)
                    case Stop():
                        self._stopping = True
                        return
                    case TurnedAway():
                        raise WorkerError(f"the head turned this instance away: {frame.message}")
                    case _:
                        self._post(frame)
        finally:
            heartbeat.cancel()
            channel.close()
            self._channel = None

    async def _join(self, setup: Setup, channel: HeadChannel) -> None:
        """Boots on the first setup; a head that came back must want the same instance."""
        if self._booted is None:
            assert self._listen_host is not None
            try:
                self._booted = await asyncio.to_thread(
                    boot_instance,
                    setup,
                    self.role,
                    self.instance_id,
                    self._listen_host,
                    self._secret,
                    self._from_thread,
                )
            except BootError as error:
                channel.send(Failed(message=str(error)))
                await channel.flush()
                raise WorkerError(str(error)) from None
            self._setup = setup
            booted = self._booted
            self._engine = EngineThread(
                booted.engine,
                booted.messenger,
                booted.eos_token_ids,
                booted.threads,
                self._from_thread,
            )
            self._engine.start()
        elif setup != self._setup:
            raise WorkerError("the head came back with another configuration; start anew")
        info = self._booted.info(self._machine, os.getpid())
        channel.send(Joined(info=info))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self._booted is not None and self._channel is not None:
                self._channel.send(self._booted.load())

    # Events in, actions out

    def _from_thread(self, event: MessengerEvent | StepEnded | StepFailed) -> None:
        """Posts from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._post, event)
        except RuntimeError:
            return  # the loop has closed: the process is ending

    def _post(self, event: WorkerEvent) -> None:
        if self._booted is None:
            return
        self._perform(self._booted.instance.handle(event, self._loop.time()))

    def _give_up_works(self) -> None:
        if self._booted is not None:
            self._perform(self._booted.instance.abort_all())

    def _perform(self, actions: list[WorkerAction]) -> None:
        assert self._booted is not None
        assert self._engine is not None
        messenger = self._booted.messenger
        for action in actions:
            match action:
                case Tell():
                    continue
                case RunStep():
                    self._engine.submit(action)
                case SendBlocks():
                    self._send_all_layers(action)
                case OpenStream():
                    messenger.open_stream(action.stream_id, action.target, action.timeout_s)
                case FinishStream():
                    messenger.finish_stream(action.stream_id)
                case AbortStream():
                    messenger.abort_stream(action.stream_id)
                case ExpectStream():
                    messenger.expect(
                        action.stream_id, action.block_ids, action.first_index, action.timeout_s
                    )
                case CancelStream():
                    messenger.cancel(action.stream_id)
                case FetchBlocks():
                    messenger.fetch(
                        action.fetch_id,
                        action.source,
                        action.keys,
                        action.block_ids,
                        action.timeout_s,
                    )
                case GrantRead():
                    messenger.grant(action.read_id, action.block_ids)
        # Last, so that the engine computes the next step while the tokens of this one are sent.
        if self._channel is not None:
            for action in actions:
                if isinstance(action, Tell):
                    self._channel.send(action.report)

    def _send_all_layers(self, action: SendBlocks) -> None:
        assert self._booted is not None
        layers = range(self._booted.layout.num_layers)
        slices = [(index, block, layer) for layer in layers for index, block in action.blocks]
        self._booted.messenger.send(action.stream_id, slices)

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.stop(timeout_s=5.0)
        if self._booted is not None:
            self._booted.close()
