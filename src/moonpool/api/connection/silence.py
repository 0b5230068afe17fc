"""Sends comments in a stream that has been silent for a time, so that proxies keep its connection.

A comment is logged before it is sent, like an increment. So another head that continues the stream
makes the same bytes again, in the same places. The first comment sends the headers, so none is sent
before the request is placed: until then a refusal has its own status.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from moonpool.api.http_context import HttpContext

PING = b'event: ping\ndata: {"type": "ping"}\n\n'
"""The event with which Anthropic's API keeps a stream alive."""


def comment_of(text: str) -> bytes:
    """Returns a comment of server-sent events, which clients ignore."""
    return b": %b\n\n" % text.encode("ascii", "replace")


def comment_at(stages: Sequence[str], has_begun: bool, pings: bool) -> bytes:
    """Returns the comment for the silent stream of a call, or nothing while the call may still be
    refused.

    `stages`: the stages of its running requests, as `ModelBackend.stage` returns them. `has_begun`:
    whether its headers have been sent. `pings`: whether its API has an event for it.
    """
    if not (has_begun or all(stages)):
        return b""
    if pings:
        return PING
    return comment_of(next(filter(None, stages), "waiting"))


_NO_LOOK = -1


class Silence:
    """Watches one stream between `heard` and `listens`. A periodic check measures the time, so that
    an increment need not read a clock."""

    def __init__(
        self, context: HttpContext, period_s: float, next_comment: Callable[[], bytes]
    ) -> None:
        """A comment comes after a silence of `period_s` at the latest, and of half of it at the
        earliest; 0 means that none comes. `next_comment` returns the comment, or an empty one if
        there is none yet."""
        self._context = context
        self._look_s = period_s / 2
        self._next_comment = next_comment
        self._timer: asyncio.TimerHandle | None = None
        self._sending: asyncio.Task[None] | None = None
        self._listens = False
        self._num_heard = self._num_sent = 0
        self._num_at_look = _NO_LOOK
        kept = context.kept
        is_resumed = kept is not None and kept.is_resumed
        self._sent_before = deque(kept.comments() if is_resumed and kept is not None else ())
        self._num_known = len(kept.deliveries()) if is_resumed and kept is not None else 0

    async def __aenter__(self) -> Self:
        if self._look_s > 0:
            self._await_look()
        if self._sent_before:
            await self.repeat()
        self._listens = True
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._listens = False
        if self._timer is not None:
            self._timer.cancel()
        if self._sending is not None:
            if isinstance(error, asyncio.CancelledError):
                self._sending.cancel()
            else:
                await self._sending

    def heard(self) -> bool:
        """Notes that an increment has come, which is logged already. If it returns True, call
        `settle` before the increment is sent."""
        self._listens = False
        self._num_heard += 1
        return self._sending is not None

    async def settle(self) -> None:
        """Waits until a comment in front of the increment is sent."""
        if self._sending is not None:
            await self._sending

    def listens(self, has_sent: bool) -> bool:
        """Notes that the increment has been sent. If it returns True, call `repeat` before the next
        increment is awaited.

        `has_sent`: whether the increment had bytes. The bytes of a tool call may be held back for
        long.
        """
        self._num_sent += has_sent
        self._listens = True
        return bool(self._sent_before)

    async def repeat(self) -> None:
        """Sends the comments that an earlier head has sent at this place."""
        while self._sent_before and self._sent_before[0][0] <= self._num_heard:
            await self._send(self._sent_before.popleft()[1])

    def _await_look(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._look_s, self._look)

    def _look(self) -> None:
        self._await_look()
        is_silent = self._listens and self._num_sent == self._num_at_look
        self._num_at_look = self._num_sent
        if not is_silent or self._sending is not None or self._num_heard < self._num_known:
            return
        comment = self._next_comment()
        if comment:
            self._num_at_look = _NO_LOOK  # the next silence begins
            self._sending = asyncio.create_task(self._log_and_send(comment))

    async def _log_and_send(self, comment: bytes) -> None:
        try:
            if self._listens:  # otherwise, an increment came first
                if self._context.kept is not None:
                    self._context.kept.note_comment(comment)
                await self._send(comment)
        finally:
            self._sending = None

    async def _send(self, comment: bytes) -> None:
        if not self._context.started:
            await self._context.start_events()
        await self._context.send_events(comment)
