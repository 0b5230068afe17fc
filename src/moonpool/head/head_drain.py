"""Ends a head in order: running answers end first, or their clients learn why they cannot.

A process manager sends SIGTERM, waits and then kills. No answer is cut within `--drain-seconds`.
After that time, each remaining stream ends with an error event instead of a cut connection.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

log = logging.getLogger("moonpool")

POLL_S = 0.05
FLUSH_S = 0.2
"""Time for the last events to be sent before the HTTP server closes."""


class DrainableHead(Protocol):
    """The head as its drain sees it."""

    @property
    def num_answers(self) -> int: ...

    def refuse_new(self) -> None: ...

    def end_answers(self, reason: str, message: str) -> None: ...


async def drain(head: DrainableHead, seconds: float) -> None:
    """Returns when no client waits for an answer, after `seconds` at the latest."""
    head.refuse_new()
    if not head.num_answers:
        return
    log.info(
        "%s may end within %g s (--drain-seconds); a second signal ends the rest now",
        _answers(head.num_answers),
        seconds,
    )
    loop = asyncio.get_running_loop()
    until_s = loop.time() + seconds
    while loop.time() < until_s:
        if not head.num_answers:
            return
        await asyncio.sleep(POLL_S)
    if head.num_answers:
        log.warning("ending %s still running", _answers(head.num_answers))
        text = "The server stopped before this answer was complete. Send the request again."
        head.end_answers("server_stopping", text)
        await asyncio.sleep(FLUSH_S)


def _answers(count: int) -> str:
    return "1 answer" if count == 1 else f"{count} answers"
