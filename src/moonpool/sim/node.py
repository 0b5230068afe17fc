"""One simulated instance: the real state machine, and who performs what it asks for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from moonpool.sim.clock import Clock
from moonpool.sim.engine import SimEngine
from moonpool.sim.transfers import SimMessenger
from moonpool.types import Role
from moonpool.workers.actions import (
    AbortStream,
    CancelStream,
    Depart,
    ExpectStream,
    FetchBlocks,
    FinishStream,
    ForgetStored,
    GrantRead,
    LoadBlocks,
    OpenStream,
    RunStep,
    SendBlocks,
    StopRepeating,
    StoreBlocks,
    Tell,
    WorkerEvent,
)
from moonpool.workers.instance import Instance
from moonpool.workers.messages import Abort, InstanceInfo, Report, RoleChanged, WorkFailed


class Node:
    """Built in two halves, because engine and messenger post to it: `attach` makes it whole."""

    def __init__(
        self,
        clock: Clock,
        info: InstanceInfo,
        instance: Instance,
        tell: Callable[[Report], None],
        depart: Callable[[], None],
    ) -> None:
        self.info = info
        self.instance = instance
        self.held_block_s: dict[Role, float] = {}  # blocks x seconds: occupation of the KVCache
        self.role_s: dict[Role, float] = {}  # how long it had each role
        self.busy_s: dict[Role, float] = {}  # and computed in it; complete after `note_role`
        self._clock = clock
        self._tell = tell
        self._depart = depart
        self._noted_s = self._role_since_s = clock.now
        self._role = instance.role
        self._busy_before_s = 0.0

    def attach(self, engine: SimEngine, messenger: SimMessenger) -> None:
        self.engine = engine
        self.messenger = messenger

    def note_occupation(self) -> None:
        """Charges the time since the last change (mutates)."""
        now = self._clock.now
        if now > self._noted_s:
            block_s = self.instance.pool.num_held * (now - self._noted_s)
            self.held_block_s[self._role] = self.held_block_s.get(self._role, 0.0) + block_s
            self._noted_s = now

    @property
    def role(self) -> Role:
        """That it has now."""
        return self.instance.role

    def note_role(self, until_s: float) -> None:
        """Charges the time since the last change to the role it had (mutates)."""
        role, busy_s = self._role, self.engine.figures.busy_s
        self.role_s[role] = self.role_s.get(role, 0.0) + max(until_s - self._role_since_s, 0.0)
        self.busy_s[role] = self.busy_s.get(role, 0.0) + busy_s - self._busy_before_s
        self._role, self._role_since_s, self._busy_before_s = self.role, until_s, busy_s

    def post(self, event: WorkerEvent) -> None:
        """One event for the state machine; performs what it asks for."""
        self.note_occupation()
        if isinstance(event, Abort):
            self.engine.forget(event.work_id)
        for action in self.instance.handle(event, self._clock.now):
            match action:
                case Tell():
                    if isinstance(action.report, WorkFailed):
                        self.engine.forget(action.report.work_id)
                    elif isinstance(action.report, RoleChanged):
                        self.note_role(self._clock.now)
                    self._tell(action.report)
                case RunStep():
                    self._run(action)
                case StopRepeating():
                    self.engine.stop_repeating()
                case OpenStream():
                    self.messenger.open_stream(action.stream_id, action.target.instance_id)
                case SendBlocks():
                    self.messenger.send(action.stream_id, action.blocks)
                case FinishStream():
                    self.messenger.finish_stream(action.stream_id)
                case AbortStream():
                    self.messenger.abort_stream(action.stream_id)
                case ExpectStream():
                    self.messenger.expect(action)
                case CancelStream():
                    self.messenger.cancel_stream(action.stream_id)
                case FetchBlocks():
                    self.messenger.fetch(action)
                case GrantRead():
                    self.messenger.grant(action.read_id, action.block_ids)
                case StoreBlocks():
                    self.messenger.store(action)
                case LoadBlocks():
                    self.messenger.load(action)
                case ForgetStored():
                    pass  # no simulated block has content
                case Depart():
                    self.messenger.gone = True
                    self.note_role(self._clock.now)
                    self._depart()

    def _run(self, step: RunStep) -> None:
        held = [index for index, entry in enumerate(step.entries) if entry.arriving is not None]
        num_layers = self.info.layout.num_layers
        start_s, end_s = self.engine.submit(step, num_layers if held else 0)
        if held:
            self._wait(step, held)
        for entry in step.entries:
            if entry.sends:
                self.messenger.send_while_computed(entry, start_s, end_s)

    def _wait(self, step: RunStep, indices: list[int]) -> None:
        """Lets the engine end the step when all that these entries wait for has ended."""
        left = set(indices)
        missed: list[int] = []

        def told(index: int, came: bool) -> None:
            left.discard(index)
            if not came:
                missed.append(index)
            if not left:
                self.engine.release(tuple(sorted(missed)))

        for index in indices:
            arriving = step.entries[index].arriving
            assert arriving is not None
            self.messenger.when_here(arriving, partial(told, index))
