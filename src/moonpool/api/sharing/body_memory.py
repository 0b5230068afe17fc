"""The bodies that a server holds at a time: a large one that is not complete makes room for others.

The first SMALL_BYTES of each body have room of their own, so that small calls never wait for large
ones. In both rooms a party has at most half of what the others leave.
"""

from __future__ import annotations

from collections.abc import Callable

from moonpool.api.errors import ApiError
from moonpool.api.sharing.shared_buffer import ReclaimedBuffer

SMALL_BYTES = 64 << 10
MAX_SMALL_BYTES = 256 << 20
"""Most bytes of the beginnings of all bodies."""
MAX_LARGE_BYTES = 256 << 20
"""Most bytes of the rest of all bodies, unless eight of the largest need more."""


class BodyMemory:
    """`max_body_bytes`: the size of the largest body."""

    def __init__(self, max_body_bytes: int = 1) -> None:
        self.small: ReclaimedBuffer[HeldBody] = ReclaimedBuffer(MAX_SMALL_BYTES)
        most = max(MAX_LARGE_BYTES, 8 * max_body_bytes)
        self.large: ReclaimedBuffer[HeldBody] = ReclaimedBuffer(most)


class HeldBody:
    """The room of one body, until `close`. `on_lost` is called if others need it before `finish`;
    then `grow` raises ApiError."""

    def __init__(self, memory: BodyMemory, party: str) -> None:
        self.on_lost: Callable[[], None] | None = None
        self.is_lost = False
        self._memory = memory
        self._party = party
        self._num_bytes = 0

    def grow(self, num_bytes: int) -> None:
        """Raises ApiError if there is no room for more bytes, or was none for earlier ones."""
        before, self._num_bytes = self._num_bytes, self._num_bytes + num_bytes
        small = min(self._num_bytes, SMALL_BYTES) - min(before, SMALL_BYTES)
        large = num_bytes - small
        memory, party = self._memory, self._party
        if self.is_lost or (small and not memory.small.grow(self, party, small)):
            raise self.refusal()
        if large and not memory.large.grow(self, party, large):
            raise self.refusal()

    def finish(self) -> None:
        """The body is complete: keeps its room."""
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
        is_large = self._num_bytes > SMALL_BYTES
        kind = "large bodies" if is_large else "bodies"
        return ApiError(
            f"This server receives too many {kind} now. Send the request again later.",
            status=503,
            code=f"too_many_{kind.replace(' ', '_')}",
            headers=((b"retry-after", b"5"),),
        )
