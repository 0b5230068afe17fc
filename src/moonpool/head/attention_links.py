"""The connections of attention workers, and the instances that wait for theirs before they start.

`AttentionAssignments` decides who serves whom; this tells the instances.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from moonpool.head.attention_assignments import AttentionAssignments
from moonpool.head.worker_link import WorkerLink
from moonpool.protocol.frames import Apply, AttentionMoved, Setup
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.types import InstanceId, Role


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
        """Notes that a connection has ended. Returns whether it was that of an attention worker."""
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
