"""Finds the data of server-sent events in bytes that come in any pieces.

All clients of streams read with this.
"""

from __future__ import annotations

from collections.abc import Callable

DONE = b"[DONE]"
MAX_EVENT_BYTES = 16 << 20


class ServerEventReader:
    """Reads one stream. A line of more than `max_bytes` is left out, and counted."""

    def __init__(
        self,
        max_bytes: int = MAX_EVENT_BYTES,
        on_comment: Callable[[bytes], None] | None = None,
    ) -> None:
        """`on_comment` gets the text of each comment."""
        self.num_left_out = 0
        self._max_bytes = max_bytes
        self._on_comment = on_comment
        self._rest = bytearray()
        self._skips = False

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the data of the lines that end with these bytes, without the "data:"."""
        cut = data.rfind(b"\n") + 1
        if not cut:
            self._keep(data)
            return []
        lines = (bytes(self._rest) + data[:cut]).split(b"\n")
        if self._skips:
            lines[0] = b""
        self._rest.clear()
        self._skips = False
        self._keep(data[cut:])
        if self._on_comment is not None:
            for line in lines:
                if line.startswith(b":"):
                    self._on_comment(line[1:].strip())
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]

    def _keep(self, data: bytes) -> None:
        if self._skips:
            return
        self._rest += data
        if len(self._rest) > self._max_bytes:
            self._rest.clear()
            self._skips = True
            self.num_left_out += 1
