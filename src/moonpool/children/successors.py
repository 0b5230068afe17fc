"""Keeps one process running: another one takes its place when it dies, with growing delays."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from enum import Enum, auto

from moonpool.retry_delays import RetryDelays


class Next(Enum):
    """Tells what follows the end of a process."""

    NONE = auto()
    AT_ONCE = auto()
    """The next process starts at once, because this one ended to make room for it."""
    AFTER_DEATH = auto()
    """The next process starts after a delay that grows with each death in short succession."""
    AFTER_GOOD_LIFE = auto()
    """The next process starts after the first delay, because this one had run well."""


class Successors:
    """Runs one process after another. `live` runs one process from its start to its end and returns
    its exit status, or None if it could not be started. `after` decides what follows."""

    def __init__(
        self,
        name: str,
        live: Callable[[], Awaitable[int | None]],
        after: Callable[[int | None], Awaitable[Next]],
        delays: RetryDelays,
        log: logging.Logger,
    ) -> None:
        """`delays`: the delays after deaths in short succession."""
        self.num_deaths = 0
        """Number of deaths in short succession."""
        self._name = name
        self._live = live
        self._after = after
        self._delays = delays
        self._log = log

    async def run(
        self,
        pause: Callable[[float], Awaitable[object]] = asyncio.sleep,
        kept: Callable[[], str] = lambda: "",
    ) -> None:
        """Runs processes one after another until none is wanted. `pause` waits this many seconds,
        or less if no further process will be wanted. `kept`: the state that the next process takes
        over, as a text for the log."""
        while True:
            code = await self._live()
            what = await self._after(code)
            if what is Next.NONE:
                return
            if what is Next.AT_ONCE:
                continue
            if what is Next.AFTER_GOOD_LIFE:
                self.num_deaths = 0
            self.num_deaths += 1
            delay_s = self._delays.after(self.num_deaths)
            text = "%s ended with code %s; the next one starts in %g s%s"
            self._log.warning(text, self._name, code, delay_s, kept())
            await pause(delay_s)
