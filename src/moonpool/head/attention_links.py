"""The connections of attention workers, and the instances that wait for theirs before they start.

`AttentionAssignments` decides which worker serves which instance; `AttentionLinks` tells the
instances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from moonpool.head.worker_link import WorkerLink
from moonpool.protocol.frames import Apply, AttentionMoved, Setup
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.types import InstanceId, Role


class AttentionAssignments:
    """Which attention workers serve which instance: the head's bookkeeping. Each decode instance
    has `per_instance` places, and an attention worker keeps its place. A lost worker is replaced by
    the same worker restarted, or by a spare one."""

    def __init__(self, per_instance: int) -> None:
        self.per_instance = per_instance
        self._places: dict[InstanceId, list[str]] = {}  # names of the workers by instance and place
        self._present: dict[str, PeerAddress] = {}

    def join(self, address: PeerAddress) -> tuple[InstanceId, int] | None:
        """Adds an attention worker. Returns the instance and the place that the worker takes: its
        former place or a vacant one. The caller must notify the instance. Returns None if it is
        spare."""
        name = address.instance_id
        self._present[name] = address
        place = self._place_of(name)
        if place is None:
            place = self._vacancy()
            if place is not None:
                self._places[place[0]][place[1]] = name
        return place

    def lose(self, name: str) -> tuple[InstanceId, int, PeerAddress] | None:
        """Removes an attention worker. Returns the instance, place and address of the spare worker
        that replaces it, or None if the worker served no instance, or no spare is left."""
        self._present.pop(name, None)
        place = self._place_of(name)
        spare = next(iter(self._spare()), None)
        if place is None or spare is None:
            return None
        owner, index = place
        self._places[owner][index] = spare
        return owner, index, self._present[spare]

    def remember(self, owner: InstanceId, names: tuple[str, ...]) -> None:
        """Records the group that a running instance reports to a restarted head."""
        for other, places in self._places.items():
            if other != owner:
                self._places[other] = ["" if name in names else name for name in places]
        self._places[owner] = list(names)

    def group_of(self, owner: InstanceId) -> tuple[PeerAddress, ...] | None:
        """Makes the group of an instance that starts, with spare workers in its vacant places.
        Returns None while there are too few workers."""
        if owner not in self._places:
            spare = self._spare()
            if len(spare) < self.per_instance:
                return None
            self._places[owner] = spare[: self.per_instance]
        places = self._places[owner]
        for index, name in enumerate(places):
            if name not in self._present:
                spare = self._spare()
                if not spare:
                    return None
                places[index] = spare[0]
        return tuple(self._present[name] for name in places)

    def owners(self) -> dict[str, InstanceId | None]:
        """Returns the owner of every attention worker that is present, or None if the worker is
        spare."""
        places = {name: self._place_of(name) for name in self._present}
        return {name: None if place is None else place[0] for name, place in places.items()}

    def _spare(self) -> list[str]:
        taken = {name for names in self._places.values() for name in names}
        return sorted(name for name in self._present if name not in taken)

    def _place_of(self, name: str) -> tuple[InstanceId, int] | None:
        for owner, names in self._places.items():
            if name in names:
                return owner, names.index(name)
        return None

    def _vacancy(self) -> tuple[InstanceId, int] | None:
        for owner, names in self._places.items():
            for index, name in enumerate(names):
                if name not in self._present:
                    return owner, index
        return None


class AttentionLinks:
    """`instances`: the links of the instances that have joined, shared with the head."""

    def __init__(
        self,
        per_instance: int,
        instances: Mapping[InstanceId, WorkerLink],
        setup: Callable[[], Setup],
    ) -> None:
        self._groups = AttentionAssignments(per_instance)
        self._instances = instances
        self._setup = setup
        self._links: dict[str, WorkerLink] = {}
        self._awaiting_group: set[WorkerLink] = set()

    def find(self, name: str) -> WorkerLink | None:
        return self._links.get(name)

    def describe(self) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "owner": owner,
                "host": self._links[name].host,
                "pid": self._links[name].pid,
            }
            for name, owner in self._groups.owners().items()
        ]

    def start(self, link: WorkerLink, apply: Apply) -> None:
        """Sends an instance its setup, now or once its attention workers are present."""
        if apply.attention:
            self._groups.remember(link.instance_id, apply.attention)
            link.channel.send(self._setup())
        elif apply.role is not Role.PREFILL and self._groups.per_instance:
            self._awaiting_group.add(link)
            self._start_with_group()
        else:
            link.channel.send(self._setup())

    def join(self, link: WorkerLink, address: PeerAddress) -> None:
        """Notes that an attention worker is ready."""
        former = self._links.get(address.instance_id)
        if former is not None and former is not link:
            former.channel.abort("it came back over a new connection")
        self._links[address.instance_id] = link
        place = self._groups.join(address)
        if place is not None:
            self._tell_owner(*place, address)
        self._start_with_group()

    def drop(self, link: WorkerLink) -> bool:
        """Notes that a connection has ended. Returns whether the connection was that of an
        attention worker."""
        self._awaiting_group.discard(link)
        if self._links.get(link.instance_id) is not link:
            return False
        del self._links[link.instance_id]
        moved = self._groups.lose(link.instance_id)
        if moved is not None:
            self._tell_owner(*moved)
        return True

    def _start_with_group(self) -> None:
        """Starts the waiting instances whose attention workers are all present."""
        for link in sorted(self._awaiting_group, key=lambda link: link.instance_id):
            group = self._groups.group_of(link.instance_id)
            if group is not None:
                self._awaiting_group.discard(link)
                link.channel.send(msgspec.structs.replace(self._setup(), attention=group))

    def _tell_owner(self, owner: InstanceId, place: int, address: PeerAddress) -> None:
        link = self._instances.get(owner)
        if link is not None:
            link.channel.send(AttentionMoved(place=place, address=address))
