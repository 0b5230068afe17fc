"""Simulates an instance: the live cluster's scheduler with a simulated engine and messenger."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from moonpool.protocol.messages import Abort, AttemptFailed, InstanceInfo, Report, RoleChanged
from moonpool.scheduler.actions import (
    AbortStream,
    CancelStream,
    ExitProcess,
    ExpectStream,
    FetchBlocks,
    FinishStream,
    ForgetStored,
    GrantRead,
    LoadBlocks,
    RunStep,
    SendBlocks,
    SendReport,
    StartStream,
    StopRepeating,
    StoreBlocks,
    WorkerEvent,
)
from moonpool.scheduler.instance import Instance, InstanceDriver, Performers
from moonpool.sim.clock import Clock
from moonpool.sim.engine import SimEngine
from moonpool.sim.transfers import SimMessenger
from moonpool.types import Role


class SimInstance:
    """Performs the actions of an `Instance` in virtual time.

    Engine and messenger post events to this instance, so `attach` adds them after construction.
    """

    def __init__(
        self,
        clock: Clock,
        info: InstanceInfo,
        instance: Instance,
        send_report: Callable[[Report], None],
        depart: Callable[[], None],
    ) -> None:
        self.info = info
        self.instance = instance
        self._pool = instance.pool
        self.held_block_s: dict[Role, float] = {}  # KVCache occupation by role, in blocks x seconds
        self.role_s: dict[Role, float] = {}  # time in each role
        self.busy_s: dict[Role, float] = {}  # compute time in each role, complete after `note_role`
        self._clock = clock
        self._send_report = send_report
        self._depart = depart
        self._noted_s = self._role_since_s = clock.now
        self._role = instance.role
        self._busy_before_s = 0.0

    def attach(self, engine: SimEngine, messenger: SimMessenger) -> None:
        """Adds engine and messenger. The caller must call `attach` before `post`."""
        self.engine = engine
        self.messenger = messenger
        performers: Performers = {
            SendReport: self._report,
            RunStep: self._run,
            StopRepeating: lambda a: engine.stop_repeating(),
            StartStream: lambda a: messenger.open_stream(a.stream_id, a.target.instance_id),
            SendBlocks: lambda a: messenger.send(a.stream_id, a.blocks),
            FinishStream: lambda a: messenger.finish_stream(a.stream_id),
            AbortStream: lambda a: messenger.abort_stream(a.stream_id),
            ExpectStream: messenger.expect,
            CancelStream: lambda a: messenger.cancel_stream(a.stream_id),
            FetchBlocks: messenger.fetch,
            GrantRead: lambda a: messenger.grant(a.read_id, a.block_ids),
            StoreBlocks: messenger.store,
            LoadBlocks: messenger.load,
            ForgetStored: lambda a: None,  # simulated blocks have no content
            ExitProcess: self._leave,
        }
        self._driver = InstanceDriver(self.instance, lambda: self._clock.now, performers)

    def note_occupation(self) -> None:
        """Counts the occupation since the last call under the current role."""
        now = self._clock.now
        if now > self._noted_s:
            block_s = self._pool.num_held * (now - self._noted_s)
            self.held_block_s[self._role] = self.held_block_s.get(self._role, 0.0) + block_s
            self._noted_s = now

    @property
    def role(self) -> Role:
        """The current role of the instance."""
        return self.instance.role

    def note_role(self, until_s: float) -> None:
        """Counts the time and compute time since the last role change under the current role."""
        role, busy_s = self._role, self.engine.figures.busy_s
        self.role_s[role] = self.role_s.get(role, 0.0) + max(until_s - self._role_since_s, 0.0)
        self.busy_s[role] = self.busy_s.get(role, 0.0) + busy_s - self._busy_before_s
        self._role, self._role_since_s, self._busy_before_s = self.role, until_s, busy_s

    def post(self, event: WorkerEvent) -> None:
        """Passes one event to the instance and performs the actions it returns."""
        self.note_occupation()
        if isinstance(event, Abort):
            self.engine.forget(event.attempt_id)
        self._driver.post(event)

    def _report(self, action: SendReport) -> None:
        report = action.report
        if isinstance(report, AttemptFailed):
            self.engine.forget(report.attempt_id)
        elif isinstance(report, RoleChanged):
            self.note_role(self._clock.now)
        self._send_report(report)

    def _leave(self, action: ExitProcess) -> None:
        self.messenger.gone = True
        self.note_role(self._clock.now)
        self._depart()

    def _run(self, step: RunStep) -> None:
        if step.max_repeats > 1:  # a step of decodes alone neither waits for blocks nor sends any
            self.engine.submit(step)
            return
        held = [index for index, entry in enumerate(step.entries) if entry.arriving is not None]
        num_layers = self.info.layout.num_layers
        start_s, end_s = self.engine.submit(step, num_layers if held else 0)
        if held:
            self._wait(step, held)
        for entry in step.entries:
            if entry.sends:
                self.messenger.send_while_computed(entry, start_s, end_s)

    def _wait(self, step: RunStep, indices: list[int]) -> None:
        """Releases the engine's step when the blocks that these entries wait for have arrived."""
        left = set(indices)
        missed: list[int] = []

        def arrived(index: int, complete: bool) -> None:
            left.discard(index)
            if not complete:
                missed.append(index)
            if not left:
                self.engine.release(tuple(sorted(missed)))

        for index in indices:
            arriving = step.entries[index].arriving
            assert arriving is not None
            self.messenger.when_arrived(arriving, partial(arrived, index))
