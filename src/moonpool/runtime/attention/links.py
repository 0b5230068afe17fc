"""The head's side of attention workers: who is there, and which instance each of them serves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from moonpool.attention_offload.groups import AttentionAssignments
from moonpool.protocol.frames import Apply, AttentionMoved, Setup
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.runtime.worker_link import WorkerLink
from moonpool.types import InstanceId, Role


class AttentionLinks:
    """`per_instance`: attention workers of each instance that decodes. `links` has the instances
    that have joined."""

    def __init__(
        self,
        per_instance: int,
        setup: Callable[[], Setup],
        links: Mapping[InstanceId, WorkerLink],
    ) -> None:
        self._groups = AttentionAssignments(per_instance)
        self._setup = setup
        self._instances = links
        self._links: dict[str, WorkerLink] = {}
        self._waiting: set[WorkerLink] = set()

    def link(self, name: str) -> WorkerLink | None:
        """Of an attention worker, if it has joined."""
        return self._links.get(name)

    def set_up(self, link: WorkerLink, apply: Apply) -> None:
        """Sends an instance its settings, when its attention workers are present."""
        if apply.attention:
            self._groups.remember(link.instance_id, apply.attention)
            link.channel.send(self._setup())
        elif apply.role is not Role.PREFILL and self._groups.per_instance:
            self._waiting.add(link)
            self._start_with_group()
        else:
            link.channel.send(self._setup())

    def join(self, link: WorkerLink, address: PeerAddress) -> None:
        """An attention worker is ready."""
        former = self._links.get(address.instance_id)
        if former is not None and former is not link:
            former.channel.abort("it came back over a new connection")
        self._links[address.instance_id] = link
        place = self._groups.join(address)
        if place is not None:
            self._tell_owner(*place, address)
        self._start_with_group()

    def lose(self, link: WorkerLink) -> None:
        """The connection of an instance or of an attention worker has ended."""
        self._waiting.discard(link)
        if self._links.get(link.instance_id) is link:
            del self._links[link.instance_id]
            moved = self._groups.lose(link.instance_id)
            if moved is not None:
                self._tell_owner(*moved)

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

    def _start_with_group(self) -> None:
        """Starts the waiting instances whose attention workers are all present."""
        for link in sorted(self._waiting, key=lambda link: link.instance_id):
            group = self._groups.group_of(link.instance_id)
            if group is not None:
                self._waiting.discard(link)
                link.channel.send(msgspec.structs.replace(self._setup(), attention=group))

    def _tell_owner(self, owner: InstanceId, place: int, address: PeerAddress) -> None:
        link = self._instances.get(owner)
        if link is not None:
            link.channel.send(AttentionMoved(place=place, address=address))
