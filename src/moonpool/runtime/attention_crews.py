"""Which attention workers serve which instance. Places are given once and kept: the worker of a
place that is lost is replaced by itself, started anew, or else by one that is to spare.
"""

from __future__ import annotations

from moonpool.kvcache.transfers import PeerAddress
from moonpool.types import InstanceId


class Crews:
    """`per_instance` places for each instance that decodes. No side effects beyond itself."""

    def __init__(self, per_instance: int) -> None:
        self.per_instance = per_instance
        self._places: dict[InstanceId, list[str]] = {}  # names of workers
        self._there: dict[str, PeerAddress] = {}

    def join(self, address: PeerAddress) -> tuple[InstanceId, int] | None:
        """An attention worker is there. Returns the place it takes of a crew that knew it or lacks
        somebody, which is to be told; None if it is to spare."""
        name = address.instance_id
        self._there[name] = address
        place = self._place_of(name)
        if place is None:
            place = self._vacancy()
            if place is not None:
                self._places[place[0]][place[1]] = name
        return place

    def lose(self, name: str) -> tuple[InstanceId, int, PeerAddress] | None:
        """One is gone. If another is to spare, it takes the place: which, and where it listens."""
        self._there.pop(name, None)
        place = self._place_of(name)
        spare = next(iter(self._spare()), None)
        if place is None or spare is None:
            return None
        owner, index = place
        self._places[owner][index] = spare
        return owner, index, self._there[spare]

    def remember(self, owner: InstanceId, names: tuple[str, ...]) -> None:
        """What an instance says that it has, to a head that does not know."""
        for other, places in self._places.items():
            if other != owner:
                self._places[other] = ["" if name in names else name for name in places]
        self._places[owner] = list(names)

    def crew(self, owner: InstanceId) -> tuple[PeerAddress, ...] | None:
        """Of an instance that is about to start; None while there are too few."""
        if owner not in self._places:
            spare = self._spare()
            if len(spare) < self.per_instance:
                return None
            self._places[owner] = spare[: self.per_instance]
        places = self._places[owner]
        for index, name in enumerate(places):
            if name not in self._there:
                spare = self._spare()
                if not spare:
                    return None
                places[index] = spare[0]
        return tuple(self._there[name] for name in places)

    def owners(self) -> dict[str, InstanceId | None]:
        """Of every attention worker that is there, whose it is; None if it is to spare."""
        places = {name: self._place_of(name) for name in self._there}
        return {name: None if place is None else place[0] for name, place in places.items()}

    def _spare(self) -> list[str]:
        taken = {name for names in self._places.values() for name in names}
        return sorted(name for name in self._there if name not in taken)

    def _place_of(self, name: str) -> tuple[InstanceId, int] | None:
        for owner, names in self._places.items():
            if name in names:
                return owner, names.index(name)
        return None

    def _vacancy(self) -> tuple[InstanceId, int] | None:
        for owner, names in self._places.items():
            for index, name in enumerate(names):
                if name not in self._there:
                    return owner, index
        return None
