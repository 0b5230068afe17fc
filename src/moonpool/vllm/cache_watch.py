"""Checks what is assumed about a vLLM server's cache: finds out why its KV events do not fit, and
compares the server's counts of hits with the expected ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from moonpool.protocol.messages import CacheView
from moonpool.vllm.actions import CacheExplained, ExplainCache, PrefixesCounted
from moonpool.vllm.cache_check import HitCheck, why_no_events
from moonpool.vllm.client import VllmError
from moonpool.vllm.dialects.server_dialect import ServerDialect
from moonpool.vllm.events import LOOK_MS, EventReader

log = logging.getLogger("moonpool.vllm")

COUNT_S = 5.0
"""Time between two reads of the server's counters."""


class CacheWatch:
    """Watches one server for as long as it is present. `post` receives the findings."""

    def __init__(
        self,
        dialect: ServerDialect,
        reader: EventReader | None,
        block_tokens: int,
        post: Callable[[CacheExplained | PrefixesCounted], None],
        fetches: bool = False,
        count_s: float = COUNT_S,
    ) -> None:
        """`fetches`: the same as in `HitCheck`. `count_s`: seconds between two reads of the
        counters."""
        self._dialect = dialect
        self._client = dialect.client
        self._reader = reader
        self._block_tokens = block_tokens
        self._post = post
        self._check = HitCheck(fetches)
        self._count_s = count_s
        self._lock = asyncio.Lock()
        self._said = ""  # last reported state of the events
        self._is_distrusted = False
        self._other_block_tokens = 0

    async def explain(self, found: ExplainCache) -> None:
        """Says that events cannot be used and why, or that they can be used again."""
        self._is_distrusted = not found.fits
        self._other_block_tokens = found.other_block_tokens
        if self._reader is None:
            return
        if not found.fits and self._reader.replay and not self._reader.num_published:
            self._reader.asks_replay = True
            await asyncio.sleep(2 * LOOK_MS / 1e3)
        await self._look_at(self._reader)

    async def run(self, view: Callable[[], CacheView | None]) -> None:
        """Reads the events and the server's counters again and again. `view`: returns what is
        assumed now."""
        # a new connection takes a moment until it receives events
        await asyncio.sleep(LOOK_MS / 1e3)
        while True:
            if self._reader is not None:
                await self._look_at(self._reader)
            try:
                counts = await self._dialect.counts()
            except VllmError:
                counts = None  # another part watches the server's health
            if counts is not None:
                self._post(PrefixesCounted(counts))
                self._compare(view())
            await asyncio.sleep(self._count_s)

    async def _look_at(self, reader: EventReader) -> None:
        """Reports once what is wrong with the events, and once that it is right again."""
        async with self._lock:
            url = self._client.url
            if reader.is_open and not self._is_distrusted:
                if self._said:
                    log.info("vLLM at %s: its KV events tell what it caches again", url)
                    self._post(CacheExplained(""))
                self._said = ""
                return
            why = why_no_events(
                reader.events,
                reader.connection,
                reader.num_published,
                self._other_block_tokens,
                self._block_tokens,
                await self._client.event_sources(),
            )
            use = "moonpool assumes that it caches the prompts it received, until they come"
            if reader.num_replayed and not self._is_distrusted:
                use = f"moonpool asks for them at {reader.replay} several times a second"
            if self._said == why + use:
                return
            if not self._said:
                text = "vLLM at %s: its KV events do not come as they should: %s; %s"
                log.warning(text, url, why, use)
            self._said = why + use
            self._post(CacheExplained(f"its KV events do not come as they should: {why}; {use}"))

    def _compare(self, view: CacheView | None) -> None:
        if view is None or not self._check.compare(view) or self._said:
            return
        if self._check.note:
            log.warning("vLLM at %s: %s", self._client.url, self._check.note)
        self._post(CacheExplained(self._check.note))
