"""What every source of endpoints is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from moonpool.epp.endpoint import Listing


class EndpointSource(Protocol):
    async def follow(self, update: Callable[[Listing], None]) -> None:
        """Calls `update` with all that there is, at first and after each change, until cancelled.
        If the source fails for a time, what it said last stays valid. Raises SourceError if it
        cannot begin."""
        ...
