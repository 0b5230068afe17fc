"""vLLM: prompts are sent as token ids to `/v1/completions`, and the client's own body to all
endpoints."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from moonpool.protocol.model_offer import COMPLETIONS
from moonpool.vllm.actions import EngineOutput
from moonpool.vllm.dialect import completion_body, is_streamed, read_output
from moonpool.vllm.dialects.server_dialect import Asked, ServerDialect
from moonpool.vllm.facts import VllmFacts, read_counts, read_facts
from moonpool.vllm.forwarded import forwarded_body
from moonpool.vllm.known_cache import PrefixCounts


class VllmDialect(ServerDialect):
    make = "vLLM"

    async def facts(self) -> VllmFacts:
        models = await self.client.get("/v1/models")
        metrics = await self.client.get("/metrics")
        document = await self.client.get("/openapi.json", optional=True)
        facts = read_facts(models, metrics.decode(errors="replace"), document, self.client.rank)
        if self.client.rank and facts.offer.generates:
            # `/metrics` still names ranks that were removed when the server was scaled down.
            fields = {"model": facts.model_id, "prompt": [0], "max_tokens": 1}
            await self.client.post(COMPLETIONS, fields)
        return facts

    async def computed(self, asked: Asked) -> AsyncGenerator[EngineOutput]:
        facts = asked.facts
        most = facts.offer.max_model_tokens
        body = completion_body(asked.submit, facts.model_id, most, asked.fingerprint)
        answer = self.client.answer(body, is_streamed(asked.submit), asked.work.traceparent)
        async with contextlib.aclosing(answer):
            async for event in answer:
                yield read_output(asked.work, event)

    def call_body(self, asked: Asked) -> bytes:
        has_pool = asked.submit.has_pool
        return forwarded_body(
            asked.work, asked.facts.model_id, asked.fingerprint, has_pool=has_pool
        )

    async def counts(self) -> PrefixCounts | None:
        metrics = (await self.client.get("/metrics")).decode(errors="replace")
        return read_counts(metrics, self.client.rank)
