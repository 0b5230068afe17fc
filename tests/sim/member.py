"""Implements the common part of both kinds of instances: the connection to the head, and the order
of events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from moonpool.protocol.messages import BlocksChanged, Command, InstanceInfo, LeaveRequested, Report
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.types import BlockKey, InstanceId, Role
from tests.sim.clock import Link
from tests.sim.control_wire import ControlWire

if TYPE_CHECKING:
    from tests.sim.world import World


class Member(ABC):
    """One incarnation of an instance. Subclasses have the state machine and the parts that it
    drives."""

    instance: Any

    def __init__(self, world: World, instance_id: InstanceId, role: Role, number: int) -> None:
        self.world = world
        self.clock = world.clock
        self.instance_id = instance_id
        self.role = role
        self.number = number
        self.alive = True
        self.joined = False
        self.is_paused = False
        self.wire: ControlWire | None = None
        # whether the process is of the earlier release
        self.is_old = instance_id in world.old_members
        self.awake_s = 0.0  # the time at which a paused process ran last
        self.leaves_within_s: float | None = None
        self._num_losses = 0
        self._events: deque[Any] = deque()
        self._performing = False
        self._to_head = Link(self.clock, world.options.slow_delay_s)
        self._from_head = Link(self.clock, world.options.slow_delay_s)

    @property
    def address(self) -> PeerAddress:
        return PeerAddress(
            instance_id=self.instance_id,
            host_id="here",
            unix_name="",
            tcp_host="127.0.0.1",
            tcp_port=self.number,
        )

    # Methods of each kind of instance:

    @abstractmethod
    def info(self) -> InstanceInfo: ...

    @abstractmethod
    def validate(self) -> None:
        """Asserts that the state machine's own sums balance."""
        ...

    @abstractmethod
    def lose_disk(self) -> None:
        """Loses all blocks that are stored below the DRAM."""
        ...

    @abstractmethod
    def attempts(self) -> list[str]:
        """Returns the attempts that hold blocks here, without transfers that end without a
        command."""
        ...

    @abstractmethod
    def keys_in_dram(self) -> set[BlockKey]: ...

    @abstractmethod
    def keys_below(self) -> set[BlockKey]: ...

    @abstractmethod
    def _perform(self, actions: list[Any]) -> None: ...

    # The head:

    def join(self) -> None:
        """Connects to the head and sends its description."""
        if not self.alive or self._waits_for_wake(self.join):
            return
        self._to_head.cut = self._from_head.cut = True
        self._to_head = Link(self.clock, self.world.options.slow_delay_s)
        self._from_head = Link(self.clock, self.world.options.slow_delay_s)
        down, info = self._from_head, self.info()
        if self.world.options.num_upgrades:
            self._connect().join(info)
        else:
            self._to_head.carry(lambda: self.world.on_joined(self, info, down))
        if self.leaves_within_s is not None:
            self.want_to_leave(self.leaves_within_s)

    def join_at_once(self) -> None:
        if self.world.options.num_upgrades:
            self._connect().join(self.info())
        else:
            self.world.on_joined(self, self.info(), self._from_head)

    def _connect(self) -> ControlWire:
        self.wire = ControlWire(
            self, self._to_head, self._from_head, self.world.head_is_old, self.is_old
        )
        return self.wire

    def receive(self, down: Link, command: Command) -> None:
        """Receives a command that the head sends over this connection."""
        if self.wire is not None:
            self.wire.command(command)
        else:
            down.carry(lambda: self.post(command))

    def lose_head(self) -> None:
        """Breaks the connection to the head; the process survives and connects again."""
        if not self.alive:
            return
        self.world.metering.on_loss(self)
        self._cut()
        if not self._waits_for_wake(self._notice_loss):
            self._notice_loss()

    def _notice_loss(self) -> None:
        self._perform(self.instance.abort_all())
        self.validate()
        self._num_losses += 1
        latest = self._num_losses
        self.clock.after(
            self.clock.rng.random(), lambda: latest == self._num_losses and self.join()
        )

    def die(self) -> None:
        self.world.metering.on_loss(self)
        self.alive = False
        self._cut()
        self.world.on_died(self)

    def want_to_leave(self, within_s: float) -> None:
        """Acts as if the process had got a signal to end. The process repeats its report to a new
        head."""
        if self._waits_for_wake(lambda: self.want_to_leave(within_s)):
            return
        self.leaves_within_s = within_s
        self._report(LeaveRequested(within_s=within_s))

    def beat(self) -> None:
        self._to_head.carry(lambda: self.world.on_beat(self))

    def _cut(self) -> None:
        self._to_head.cut = self._from_head.cut = True
        self.world.on_link_cut(self, self._from_head)
        self.joined = False

    def _report(self, report: Report) -> None:
        if isinstance(report, BlocksChanged) and self.world.chance("lost_event_rate"):
            self.world.promises.on_lost_event(self.instance_id, report)
            return
        if self.wire is None:
            self._to_head.carry(lambda: self.world.on_report(self, report))
        else:
            self.wire.report(report)

    # Events:

    def post(self, event: Any) -> None:
        """Handles an event and performs its actions. An event that an action causes immediately is
        handled after all earlier actions, as a driver does. Otherwise, reports could overtake each
        other."""
        self._events.append(event)
        if not self._performing:
            self._handle_events()

    def _handle_events(self) -> None:
        self._performing = True
        while self._events and not self.is_paused:
            event = self._events.popleft()
            if not self.alive:
                continue
            if callable(event):
                event()
                continue
            self.world.note(self.instance_id, event)
            actions = self.instance.handle(event, self.clock.now)
            self.validate()
            self._perform(actions)
        self._performing = False

    def pause(self) -> None:
        """Stops the process: it handles no event until it wakes."""
        self.is_paused, self.awake_s = True, self.clock.now

    def wake(self) -> None:
        self.is_paused = False
        if not self._performing:
            self._handle_events()

    def _waits_for_wake(self, callback: Callable[[], None]) -> bool:
        if self.is_paused:
            self._events.append(callback)
        return self.is_paused

    def later(self, callback: Callable[[], None]) -> None:
        """Runs the callback some time later, if the instance is still alive."""
        self.clock.soon(self.world.options.slow_delay_s, lambda: self.alive and callback())
