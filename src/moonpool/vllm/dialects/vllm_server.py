"""vLLM: prompts as token ids at `/v1/completions`, and the client's own body at all endpoints."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from moonpool.vllm.actions import EngineOutput, SubmitRequest
from moonpool.vllm.client import VllmClient
from moonpool.vllm.dialect import completion_body, is_streamed, read_output
from moonpool.vllm.dialects.server_dialect import SlotUse
from moonpool.vllm.facts import VllmFacts, read_counts, read_facts
from moonpool.vllm.forwarded import forwarded_body, forwarded_outputs
from moonpool.vllm.known_cache import PrefixCounts


class VllmDialect:
    make = "vLLM"

    def __init__(self, client: VllmClient) -> None:
        self.client = client

    async def facts(self) -> VllmFacts:
        models = await self.client.get("/v1/models")
        metrics = await self.client.get("/metrics")
        document = await self.client.get("/openapi.json", optional=True)
        return read_facts(models, metrics.decode(errors="replace"), document, self.client.rank)

    async def outputs(
        self,
        submit: SubmitRequest,
        facts: VllmFacts,
        layout_fingerprint: bytes,
        use: SlotUse | None = None,
    ) -> AsyncGenerator[EngineOutput]:
        work = submit.attempt
        if work.call is not None:
            body = forwarded_body(
                work, facts.model_id, layout_fingerprint, has_pool=submit.has_pool
            )
            async with contextlib.aclosing(forwarded_outputs(self.client, work, body)) as outputs:
                async for output in outputs:
                    yield output
            return
        body = completion_body(
            submit, facts.model_id, facts.offer.max_model_tokens, layout_fingerprint
        )
        answer = self.client.answer(body, is_streamed(submit), work.traceparent)
        async with contextlib.aclosing(answer):
            async for event in answer:
                yield read_output(work, event)

    async def counts(self) -> PrefixCounts | None:
        metrics = (await self.client.get("/metrics")).decode(errors="replace")
        return read_counts(metrics, self.client.rank)
