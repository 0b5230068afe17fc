"""What passes of a response tells of tokens: how many came, and whether it is complete."""

from __future__ import annotations

import re

from moonpool.server_events import DONE, ServerEventReader

MAX_REST_BYTES = 1 << 20
"""Largest part of an event that has not ended. A longer one is not counted."""
TAIL_BYTES = 16 << 10
"""vLLM writes the usage last."""
_USED = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,9})')
_DONE = (DONE, b'"message_stop"', b'"response.completed"', b'"response.incomplete"')
_EMPTY = b'"content":""'  # the role comes before the first token


class ResponseWatch:
    """Watches one successful response. `is_stream`: whether it is a stream of server-sent
    events."""

    def __init__(self, is_stream: bool) -> None:
        self._is_stream = is_stream
        self._events = ServerEventReader(MAX_REST_BYTES)
        self._rest = b""
        self.num_tokens = 0
        self.is_done = False

    def feed(self, data: bytes) -> int:
        """Takes the next bytes; returns how many tokens came with them."""
        if not self._is_stream:
            self._rest = (self._rest + data)[-TAIL_BYTES:]
            return 0
        number = sum(map(self._take, self._events.feed(data)))
        self.num_tokens += number
        return number

    def end(self) -> int:
        """Notes that the response has ended; returns how many tokens are to be added."""
        if self._is_stream:
            return self.feed(b"\n")
        used = _USED.findall(self._rest)
        self.is_done, self.num_tokens = True, int(used[-1]) if used else 1
        return self.num_tokens

    def _take(self, event: bytes) -> int:
        if any(mark in event for mark in _DONE):
            self.is_done = True
            return 0
        if b'"delta"' in event or b'"text"' in event or b'"token_ids"' in event:
            return 0 if _EMPTY in event else 1
        return 0
