"""Pauses processes, as in a paused virtual machine: for seconds they handle no event, and then all
events together. The clock of a process has jumped when it continues.

After a pause, the head checks its instances' silence before it reads the messages that came
meanwhile, because an event loop may do so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from moonpool.conductor.actions import InstanceLost, Tick
from moonpool.head.head import SILENCE_S, TICK_S
from moonpool.link.silence import ListeningClock
from moonpool.protocol.frames import HEARTBEAT_S
from moonpool.types import InstanceId

if TYPE_CHECKING:
    from tests.sim.member import Member
    from tests.sim.world import World

PAUSES_S = (0.5, 3.0, 10.0, 20.0, 40.0)
SLACK_S = 4.0
"""The time between the end of an instance's silence and the moment when the head must notice
it."""


class Pauses:
    """Holds the pauses of a run, and how the head measures the silence of its instances."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.total_s = 0.0
        self.head_is_paused = False
        self._head_began_s = self._head_ended_s = -1.0
        self._inbox: list[Callable[[], None]] = []
        self._clock = ListeningClock(0.0)
        self._heard_s: dict[InstanceId, float] = {}

    def start(self) -> None:
        options, clock = self._world.options, self._world.clock
        begins = [self._pause_head] * options.num_head_pauses
        begins += [self._pause_one] * options.num_pauses
        for begin in begins:
            pause_s = clock.rng.choice(PAUSES_S)
            self.total_s += pause_s
            clock.after(clock.rng.random() * 3, lambda b=begin, s=pause_s: b(s))
        if self.total_s:
            clock.after(HEARTBEAT_S, self._beat)

    # The head:

    def defer(self, callback: Callable[[], None]) -> bool:
        """Keeps an event for a paused head until the head continues. Returns False if the head is
        not paused."""
        if self.head_is_paused:
            self._inbox.append(callback)
        return self.head_is_paused

    def on_heard(self, instance_id: InstanceId) -> None:
        self._heard_s[instance_id] = self._clock.listened_s

    def tick(self) -> None:
        """Runs one turn of the head's ticker (`head.head`)."""
        world = self._world
        if not self.total_s or not world.head_is_up:
            self._clock.tick(world.clock.now)
            world.post(Tick())
            return
        if self._clock.tick(world.clock.now):
            world.clock.after(TICK_S, lambda: world.post(Tick()))
        else:
            world.post(Tick())
        for instance_id, member in world.members().items():
            if self._clock.listened_s - self._heard_s[instance_id] > SILENCE_S:
                self._drop(member)

    def _pause_head(self, pause_s: float) -> None:
        if not self._world.head_is_up or self.head_is_paused:
            return
        self._world.seen["paused heads"] += 1
        self.head_is_paused = True
        self._head_began_s = self._world.clock.now
        self._world.clock.after(pause_s, self._wake_head)

    def _wake_head(self) -> None:
        self.head_is_paused = False
        self._head_ended_s = self._world.clock.now
        self.tick()
        inbox, self._inbox = self._inbox, []
        for callback in inbox:
            callback()

    def _drop(self, member: Member) -> None:
        """Ends the connection of a silent instance, like the head. The instance's launcher kills
        the process, or the process is out of reach and comes back later."""
        world = self._world
        world.seen["silent instances"] += 1
        silent_s = world.clock.now - member.awake_s
        assert member.is_paused and silent_s > SILENCE_S - SLACK_S, (
            f"{member.instance_id} is healthy and taken for dead"
        )
        world.forget_channel(member)
        world.post(InstanceLost(member.instance_id, "it is silent"))
        if world.clock.rng.random() < 0.5:
            member.die()
        else:
            member.lose_head()

    # Instances:

    def _pause_one(self, pause_s: float) -> None:
        member = self._world.clock.rng.choice(list(self._world.lives.values()))
        if not member.alive or member.is_paused:
            return
        self._world.seen["paused instances"] += 1
        begun_s = self._world.clock.now
        member.pause()
        self._world.clock.after(pause_s, lambda: self._wake(member, begun_s))

    def _wake(self, member: Member, begun_s: float) -> None:
        if not member.alive:
            return
        now = self._world.clock.now
        head_was_paused = self.head_is_paused or self._head_ended_s > begun_s
        if now - begun_s > SILENCE_S + SLACK_S and not head_was_paused:
            known = self._world.members().get(member.instance_id)
            assert known is not member, f"{member.instance_id} was silent and nobody noticed"
        member.wake()

    def _beat(self) -> None:
        for member in self._world.lives.values():
            if member.alive and member.joined and not member.is_paused:
                member.beat()
        if self._world.goes_on():
            self._world.clock.after(HEARTBEAT_S, self._beat)
