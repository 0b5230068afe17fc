"""The bodies that are held until their calls are placed, within a bound for all together."""

from __future__ import annotations

from moonpool.api.errors import ApiError
from moonpool.api.serving_backend import RequestRefused

BODIES = 16
"""Largest bodies that are held at a time; smaller ones may be many more."""


class BodyRoom:
    """`share` gives a body its part. `max_body_bytes`: the limit of one body."""

    def __init__(self, max_body_bytes: int) -> None:
        self.max_body_bytes = max_body_bytes
        self.left_bytes = BODIES * max_body_bytes

    def share(self) -> HeldParts:
        return HeldParts(self)


class HeldParts:
    """The parts of one body. `close` gives back what they take."""

    def __init__(self, room: BodyRoom) -> None:
        self._room = room
        self._parts: list[bytes] = []
        self._num_bytes = 0

    def add(self, part: bytes) -> None:
        """Raises ApiError (413), and RequestRefused (503) if all bodies together take too much."""
        most = self._room.max_body_bytes
        if self._num_bytes + len(part) > most:
            text = f"The body exceeds {most} bytes, the largest that is read."
            raise ApiError(text, status=413, code="body_too_large")
        if len(part) > self._room.left_bytes:
            text = "Too many bodies are being read. Send the request again later."
            raise RequestRefused(503, "too_many_large_bodies", text, 1.0)
        self._room.left_bytes -= len(part)
        self._num_bytes += len(part)
        self._parts.append(part)

    def whole(self) -> bytes:
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)

    def close(self) -> None:
        self._room.left_bytes += self._num_bytes
        self._parts, self._num_bytes = [], 0
