"""Notices changes of what a server serves: LoRA adapters that are loaded or unloaded, and another
model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from moonpool.protocol.model_offer import ModelOffer, OfferedAdapter
from moonpool.vllm.client import VllmError
from moonpool.vllm.dialect import DialectError
from moonpool.vllm.dialects.openai_server import Listed, read_listed
from moonpool.vllm.dialects.server_dialect import ServerDialect

OFFER_S = 5.0
"""How often a server is asked which models and adapters it has."""
LEAST_S = 0.2


class OfferWatch:
    """`on_adapters` gets all adapters of the server when they have changed."""

    def __init__(
        self,
        dialect: ServerDialect,
        offer: ModelOffer,
        on_adapters: Callable[[tuple[OfferedAdapter, ...]], None],
    ) -> None:
        self._dialect = dialect
        self._names = frozenset(offer.names)
        self._adapters = offer.adapters
        self._on_adapters = on_adapters
        self._own: frozenset[Listed] | None = None
        self._due = asyncio.Event()

    def look(self) -> None:
        """Asks the server soon (after LEAST_S), because it lacks an adapter that it had."""
        self._due.set()

    async def run(self, every_s: float) -> None:
        """Returns when the server has another model under its names, or none."""
        while True:
            try:
                if not await self._is_same():
                    return
            except (VllmError, DialectError):
                pass  # another part watches the server's health
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await self._due.wait()
                await asyncio.sleep(LEAST_S)  # waits, because many calls may miss the same adapter
            self._due.clear()

    async def _is_same(self) -> bool:
        listed = read_listed(await self._dialect.client.get("/v1/models"))
        found = frozenset(one for one in listed if one.id in self._names)
        if self._own is not None and found != self._own:
            return False
        self._own = found
        adapters = self._adapters
        loaded = {one.id for one in listed if one.parent}
        # some makes of servers list their adapters elsewhere
        if loaded != {one.name for one in adapters}:
            adapters = (await self._dialect.facts()).offer.adapters
        if adapters != self._adapters:
            self._adapters = adapters
            self._on_adapters(adapters)
        return True
