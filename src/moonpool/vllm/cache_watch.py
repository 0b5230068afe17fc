"""Watches over what is believed of a vLLM server's cache: finds out why its KV events do not fit,
and compares its own counts of hits with what was expected."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from moonpool.protocol.messages import CacheView
from moonpool.vllm.cache_check import HitCheck, why_no_events
from moonpool.vllm.client import VllmClient, VllmError
from moonpool.vllm.events import LOOK_MS, EventReader
from moonpool.vllm.instance import CacheExplained, ExplainCache, PrefixesCounted

log = logging.getLogger("moonpool.vllm")

COUNT_S = 10.0
"""From one look at the server's counters to the next."""


class CacheWatch:
    """Of one server, as long as it is there. `post` takes what is found out."""

    def __init__(
        self,
        client: VllmClient,
        reader: EventReader | None,
        block_tokens: int,
        post: Callable[[CacheExplained | PrefixesCounted], None],
    ) -> None:
        self._client = client
        self._reader = reader
        self._block_tokens = block_tokens
        self._post = post
        self._check = HitCheck()

    async def explain(self, found: ExplainCache) -> None:
        """Says once that events are of no use and why, and once that they are again."""
        reader = self._reader
        if reader is None:
            return
        if found.fits:
            log.info("vLLM at %s: its KV events tell what it caches again", self._client.url)
            return
        text = why_no_events(
            reader.events,
            reader.connection,
            reader.num_batches,
            found.other_block_tokens,
            self._block_tokens,
            await self._client.event_sources(),
        )
        use = "moonpool assumes that it caches the prompts it received, until they do"
        if await self._replays(reader):
            use = f"moonpool asks for them at {reader.replay} every {LOOK_MS // 1000} s"
        log.warning("vLLM at %s: its KV events are of no use: %s; %s", self._client.url, text, use)
        self._post(CacheExplained(f"no use of its KV events: {text}"))

    async def _replays(self, reader: EventReader) -> bool:
        """Whether the replay endpoint has events that do not come by themselves."""
        if not reader.replay or reader.num_batches:
            return False
        reader.asks_replay = True
        await asyncio.sleep(2 * LOOK_MS / 1e3)
        return reader.asks_replay and reader.num_batches > 0

    async def count(self, view: Callable[[], CacheView | None]) -> None:
        """Reads the server's counters again and again. `view`: what is believed now."""
        while True:
            try:
                counts = await self._client.prefix_counts()
            except VllmError:
                counts = None  # its health is watched elsewhere
            if counts is not None:
                self._post(PrefixesCounted(counts))
                self._compare(view())
            await asyncio.sleep(COUNT_S)

    def _compare(self, view: CacheView | None) -> None:
        if view is None or not self._check.compare(view) or view.source == "distrusted":
            return
        if self._check.note:
            log.warning("vLLM at %s: %s", self._client.url, self._check.note)
        self._post(CacheExplained(self._check.note))
