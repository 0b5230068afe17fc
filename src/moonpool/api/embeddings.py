"""`/v1/embeddings`: texts become vectors, each by a request that only prefills."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
import numpy as np

from moonpool.api.bodies import EmbeddingsBody
from moonpool.api.call_headers import TimeLimits, limits_of, tenant_of
from moonpool.api.connection.kept_stream import KeptStream
from moonpool.api.connection.poison import marked
from moonpool.api.http_context import HttpContext
from moonpool.api.models.endpoint import ModelEndpoint
from moonpool.api.serving_backend import RequestRefused
from moonpool.types import FinishReason, Request, RequestId, SamplingParams

MAX_RUNNING = 32
"""The most requests of one call that run at a time. The Conductor does not know the other requests
yet, so they take no place in a queue.
"""


@dataclass(frozen=True, slots=True)
class _Shared:
    """State that all requests of one call share."""

    tenant: str
    adapter: str
    limits: TimeLimits
    priority: int
    delivered: tuple[int, ...] | None  # () if an earlier head admitted the call


@dataclass(frozen=True, slots=True)
class _Found:
    embedding: bytes
    cached_tokens: int


class Embedder(ModelEndpoint):
    """Serves `/v1/embeddings`."""

    async def embed(self, context: HttpContext) -> None:
        limits = limits_of(context, self._backend)
        raw = await context.read_body(self._options.max_body_bytes, self._options.body_timeout_s)
        is_resumed = context.kept is not None and context.kept.is_resumed
        if not is_resumed:
            await self._rates.admit(context.tenant, limits.arrived_s)
        digest = await context.digest(raw)
        card = self._backend.card
        arrived_s, _ = context.keep_call(raw, limits.arrived_s, card, digest=digest)
        limits = limits.since(arrived_s)
        left_s = limits.left_s(self._backend.now())
        call = await self._bodies.call("embeddings", raw, context.party, left_s)
        body: EmbeddingsBody = call.original
        tenant = tenant_of(context.tenant, body.cache_salt)
        adapter = card.adapter_of(body.model)
        priority = self._rates.priority(context.tenant, body.priority, context.is_operator, None)
        shared = _Shared(tenant, adapter, limits, priority, () if is_resumed else None)
        num_tokens = 0 if is_resumed else sum(map(len, call.prompts))
        with (
            self._rates.prompts(context.tenant, num_tokens),
            self._active.begin(context) as (request_id, scoped),
            context.kept_refusals(),
        ):
            async with context.watch():
                found = await self._run(scoped, call.prompts, shared, context.kept)
        await context.respond(200, self._response(request_id, body, call.prompts, found))

    async def _run(
        self,
        scoped: str,
        prompts: Sequence[tuple[int, ...]],
        shared: _Shared,
        kept: KeptStream | None,
    ) -> list[_Found]:
        """Runs one request per prompt. If one request fails, all end and its error is raised."""
        room = asyncio.Semaphore(MAX_RUNNING)

        async def one(index: int, token_ids: tuple[int, ...]) -> _Found:
            async with room:
                request_id = RequestId(f"{scoped}~{index}" if index else scoped)
                call = scoped if len(prompts) > 1 else ""
                return await self._embedding(request_id, token_ids, shared, call)

        works = [marked(one(*numbered), kept) for numbered in enumerate(prompts)]
        tasks = [asyncio.create_task(work) for work in works]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _embedding(
        self, request_id: RequestId, token_ids: tuple[int, ...], shared: _Shared, call: str
    ) -> _Found:
        backend = self._backend
        pooling = backend.card.pooling
        request = Request(
            request_id=request_id,
            token_ids=token_ids,
            sampling=SamplingParams(
                temperature=0.0, max_tokens=1, ignore_eos=True, pooling=pooling
            ),
            slo=shared.limits.slo,
            arrived_s=backend.now(),
            deadline_s=shared.limits.deadline_s,
            tenant=shared.tenant,
            adapter=shared.adapter,
            priority=shared.priority,
            use_cache=pooling == "last",  # cached tokens have no hidden states
            call=call,
        )
        found: _Found | None = None
        async with aclosing(backend.submit(request, shared.delivered)) as outputs:
            async for output in outputs:
                if output.finish_reason is FinishReason.ABORT:
                    text = "The server aborted this request. Send it again."
                    raise RequestRefused(503, "aborted", text)
                if output.tokens:
                    found = _Found(output.tokens[0].payload, output.cached_tokens)
        if found is None or not found.embedding:
            raise RuntimeError(f"request {request_id} ended without an embedding")
        return found

    def _response(
        self,
        request_id: str,
        body: EmbeddingsBody,
        prompts: Sequence[tuple[int, ...]],
        found: Sequence[_Found],
    ) -> bytes:
        vectors = [shortened(each.embedding, body.dimensions) for each in found]
        in_base64 = body.encoding_format == "base64"
        num_tokens = sum(map(len, prompts))
        cached_tokens = sum(each.cached_tokens for each in found)
        answer = {
            "id": f"embd-{request_id}",
            "object": "list",
            "data": [
                {
                    "object": "embedding",
                    "index": index,
                    "embedding": base64.b64encode(vector).decode()
                    if in_base64
                    else np.frombuffer(vector, "<f4").tolist(),
                }
                for index, vector in enumerate(vectors)
            ],
            "model": body.model or self._name,
            "usage": {
                "prompt_tokens": num_tokens,
                "total_tokens": num_tokens,
                "prompt_tokens_details": {"cached_tokens": cached_tokens},
            },
        }
        return msgspec.json.encode(answer)


def shortened(embedding: bytes, dimensions: int | None) -> bytes:
    """Returns the first numbers of an embedding, scaled to length 1 again. All numbers are
    float32."""
    vector = np.frombuffer(embedding, "<f4")
    if dimensions is None or dimensions == len(vector):
        return embedding
    kept = vector[:dimensions].astype(np.float64)
    length = max(float(np.sqrt(np.square(kept).sum())), 1e-300)
    return (kept / length).astype("<f4").tobytes()
