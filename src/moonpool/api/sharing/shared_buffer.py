"""Buffers shared by many clients, divided so that no client locks another out.

A **party** is a tenant, or an address where no key tells the tenant. A party may use half of what
the other parties leave, so that a new party always finds room: two parties that take all they can
have a third each, and three parties a quarter. The party "" has no other parties beside it, and may
use everything.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterable, Iterator
from ipaddress import IPv6Address, ip_address
from typing import Generic, Protocol, TypeVar

from moonpool.api.errors import ApiError

_NETWORK_BITS = 64
"""An IPv6 client may choose its address from a whole network of this many bits."""


class SharedBuffer:
    """A buffer of at most `capacity` bytes or places."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.taken = 0
        self._taken_by: dict[str, int] = {}

    def taken_by(self, party: str) -> int:
        return self._taken_by.get(party, 0)

    def has_room(self, party: str, amount: int = 1, more: int = 0) -> bool:
        """`more`: the amount that other parties might give back."""
        own = self.taken_by(party)
        left = self.capacity - (self.taken - own - more)
        return own + amount <= (left if not party else (left + 1) // 2)

    def take(self, party: str, amount: int = 1) -> bool:
        """Takes a part of the buffer, and returns whether there was room."""
        if not self.has_room(party, amount):
            return False
        self.add(party, amount)
        return True

    def add(self, party: str, amount: int) -> None:
        """Counts an amount that is already there."""
        self.taken += amount
        self._taken_by[party] = self.taken_by(party) + amount

    def release(self, party: str, amount: int = 1) -> None:
        self.taken -= amount
        left = self.taken_by(party) - amount
        if left:
            self._taken_by[party] = left
        else:
            del self._taken_by[party]

    @contextlib.contextmanager
    def place(self, party: str) -> Iterator[bool]:
        """Takes one place until the context ends, and yields whether there was one."""
        found = self.take(party)
        try:
            yield found
        finally:
            if found:
                self.release(party)


K = TypeVar("K")


def oldest_of_most(entries: Iterable[tuple[K, str, float]]) -> K:
    """Returns which entry goes first if not all can stay: the oldest one of the party that has
    most. `entries`: at least one, each with its party and size, oldest first."""
    sizes: dict[str, float] = {}
    oldest: dict[str, K] = {}
    for key, party, size in entries:
        sizes[party] = sizes.get(party, 0.0) + size
        oldest.setdefault(party, key)
    return oldest[max(sizes, key=sizes.__getitem__)]


class Holder(Protocol):
    """The holder of a part of a buffer that others may need."""

    def give_back(self) -> None:
        """Ends the work for which the part is held. The buffer has forgotten the part already."""
        ...


H = TypeVar("H", bound=Holder)


class ReclaimedBuffer(Generic[H]):
    """A shared buffer whose parts are taken back when others need them: first the oldest part of
    the party that has most. After `keep`, only the holder itself gives a part back."""

    def __init__(self, capacity: int) -> None:
        self._buffer = SharedBuffer(capacity)
        self._amounts: dict[H, tuple[str, int]] = {}
        # parts that may be taken back, by party, with the oldest first
        self._loose: dict[str, dict[H, None]] = {}

    @property
    def taken(self) -> int:
        return self._buffer.taken

    def grow(self, holder: H, party: str, amount: int) -> bool:
        """Adds to what the holder has of the buffer. Returns False if the holder's party has too
        much already."""
        if not self._buffer.has_room(party, amount):
            found = self._reclaimable(party, amount)
            for each in found:
                self.drop(each)
                each.give_back()
            if not found:
                return False
        self._buffer.add(party, amount)
        before = self._amounts.get(holder)
        if before is None:
            self._loose.setdefault(party, {})[holder] = None
        self._amounts[holder] = party, amount + (0 if before is None else before[1])
        return True

    def keep(self, holder: H) -> None:
        if holder in self._amounts:
            self._forget(holder, self._amounts[holder][0])

    def drop(self, holder: H) -> None:
        """Drops the holder's part, if it has one."""
        if holder in self._amounts:
            party, amount = self._amounts.pop(holder)
            self._forget(holder, party)
            self._buffer.release(party, amount)

    def _reclaimable(self, party: str, amount: int) -> list[H]:
        """Returns the parts to drop so that there is enough room, or none if that is impossible.
        Each part belongs to a party that has more than this party would have."""
        wanted = self._buffer.taken_by(party) + amount
        sums = {name: self._buffer.taken_by(name) for name in self._loose}
        oldest = {name: iter(parts) for name, parts in self._loose.items()}
        found: list[H] = []
        more = 0
        while not self._buffer.has_room(party, amount, more):
            richest = max(sums, key=sums.__getitem__, default=None)
            if richest is None or sums[richest] <= wanted:
                return []
            part = next(oldest[richest], None)
            if part is None:
                del sums[richest]
                continue
            found.append(part)
            sums[richest] -= self._amounts[part][1]
            more += self._amounts[part][1]
        return found

    def _forget(self, holder: H, party: str) -> None:
        loose = self._loose.get(party)
        if loose is not None:
            loose.pop(holder, None)
            if not loose:
                del self._loose[party]


def party_of(address: str) -> str:
    """Returns the party of a client that no key names: its address, or its network of IPv6."""
    try:
        found = ip_address(address)
    except ValueError:
        return f"address {address}"
    if isinstance(found, IPv6Address):
        if found.ipv4_mapped is not None:
            return f"address {found.ipv4_mapped}"
        network = int(found) >> (128 - _NETWORK_BITS) << (128 - _NETWORK_BITS)
        return f"address {IPv6Address(network)}/{_NETWORK_BITS}"
    return f"address {found}"


def party_at(sock: socket.socket) -> str:
    """Returns the party at the other end of a TCP connection, or "" if the client has gone."""
    try:
        return party_of(sock.getpeername()[0])
    except OSError:
        return ""


SMALL_BYTES = 64 << 10
MAX_SMALL_BYTES = 256 << 20
"""Most bytes held of the first SMALL_BYTES of all bodies together."""
MAX_LARGE_BYTES = 256 << 20
"""Most bytes held of all bodies together after their first SMALL_BYTES, unless eight bodies of the
largest size need more."""


class BodyMemory:
    """The bodies that a server holds at a time; an incomplete large body makes room for others.
    `max_body_bytes`: the size of the largest body.

    The first SMALL_BYTES of each body have separate room, so that small calls never wait for large
    ones. In both buffers a party has at most half of what the other parties leave.
    """

    def __init__(self, max_body_bytes: int = 1) -> None:
        self.small: ReclaimedBuffer[HeldBody] = ReclaimedBuffer(MAX_SMALL_BYTES)
        most = max(MAX_LARGE_BYTES, 8 * max_body_bytes)
        self.large: ReclaimedBuffer[HeldBody] = ReclaimedBuffer(most)


class HeldBody:
    """The memory of one body, until `close`. `on_lost` is called if others need the memory before
    `finish`; then `grow` raises ApiError."""

    def __init__(self, memory: BodyMemory, party: str) -> None:
        self.on_lost: Callable[[], None] | None = None
        self.is_lost = False
        self._memory = memory
        self._party = party
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Raises ApiError if there is no room for more bytes, or there was none for earlier
        bytes."""
        before, self._num_bytes = self._num_bytes, self._num_bytes + num_bytes
        small = min(self._num_bytes, SMALL_BYTES) - min(before, SMALL_BYTES)
        large = num_bytes - small
        memory, party = self._memory, self._party
        if self.is_lost or (small and not memory.small.grow(self, party, small)):
            raise self.refusal()
        if large and not memory.large.grow(self, party, large):
            raise self.refusal()

    def finish(self) -> None:
        """Marks the body as complete, so that it keeps its memory."""
        self._memory.small.keep(self)
        self._memory.large.keep(self)

    def close(self) -> None:
        self._memory.small.drop(self)
        self._memory.large.drop(self)

    def give_back(self) -> None:
        self.is_lost = True
        self.close()
        if self.on_lost is not None:
            self.on_lost()

    def refusal(self) -> ApiError:
        kind, code = "bodies", "too_many_bodies"
        if self._num_bytes > SMALL_BYTES:
            kind, code = "large bodies", "too_many_large_bodies"
        return ApiError(
            f"This server receives too many {kind} now. Send the request again later.",
            status=503,
            code=code,
            headers=((b"retry-after", b"5"),),
        )
