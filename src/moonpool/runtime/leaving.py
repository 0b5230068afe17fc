"""A worker's wish to end in order: the head is told, drains the instance, and lets it go."""

from __future__ import annotations

import time

from moonpool.runtime.head_link import HeadLink
from moonpool.workers.messages import WantsToLeave


class Leaving:
    """One per worker; there is no such wish until `begin`."""

    def __init__(self) -> None:
        self._by_s: float | None = None

    def begin(self, within_s: float, link: HeadLink) -> None:
        self._by_s = time.monotonic() + within_s
        self.tell(link)

    def tell(self, link: HeadLink) -> None:
        """Also to a head that came back. Nothing where there is no such wish."""
        if self._by_s is not None:
            link.send(WantsToLeave(within_s=max(self._by_s - time.monotonic(), 0.0)))

    @property
    def overdue(self) -> bool:
        """No head will see to it in time any more."""
        return self._by_s is not None and time.monotonic() > self._by_s
