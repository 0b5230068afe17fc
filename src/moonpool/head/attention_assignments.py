"""Which attention workers serve which instance: the head's bookkeeping.

An instance has a fixed number of places, and a worker keeps its place. A lost worker is replaced by
the same worker restarted, or by a spare one.
"""

from __future__ import annotations

from moonpool.protocol.transfer_events import PeerAddress
from moonpool.types import InstanceId


class AttentionAssignments:
    """`per_instance` places for each instance that decodes, each for one attention worker."""

    def __init__(self, per_instance: int) -> None:
        self.per_instance = per_instance
        self._places: dict[InstanceId, list[str]] = {}  # names of workers
        self._present: dict[str, PeerAddress] = {}

    def join(self, address: PeerAddress) -> tuple[InstanceId, int] | None:
        """Adds an attention worker. Returns the instance and place that it takes, which
        must be notified: its former place, or a vacant one. Returns None if it is spare."""
        name = address.instance_id
        self._present[name] = address
        place = self._place_of(name)
        if place is None:
            place = self._vacancy()
            if place is not None:
                self._places[place[0]][place[1]] = name
        return place

    def lose(self, name: str) -> tuple[InstanceId, int, PeerAddress] | None:
        """Removes an attention worker. Returns instance, place and address of the spare
        worker that replaces it, or None if none does."""
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
        """The owner of every attention worker that is present; None if it is spare."""
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
