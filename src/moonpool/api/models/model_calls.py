"""The endpoints that compute, as routes: each call goes to the model that it means, and there to
what answers it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from moonpool.api.cluster_view import ClusterView
from moonpool.api.errors import ApiError
from moonpool.api.generate import Generator
from moonpool.api.http_context import HttpContext
from moonpool.api.models.model_apis import ModelApi, ModelApis


class ModelCalls:
    def __init__(self, models: ModelApis, view: ClusterView) -> None:
        self._models, self._view = models, view

    async def chat(self, context: HttpContext) -> None:
        await self._generate(context, Generator.chat)

    async def complete(self, context: HttpContext) -> None:
        await self._generate(context, Generator.complete)

    async def respond(self, context: HttpContext) -> None:
        await self._generate(context, Generator.respond)

    async def message(self, context: HttpContext) -> None:
        await self._generate(context, Generator.message)

    async def embed(self, context: HttpContext) -> None:
        api = await self._models.of_call(context)
        if context.scope["path"] in api.backend.card.forwards:
            await api.forwarder.pool(context)
        else:
            await api.embedder.embed(context)

    async def pool(self, context: HttpContext) -> None:
        """Answers the endpoints that only vLLM servers have."""
        await (await self._models.of_call(context)).forwarder.pool(context)

    async def load(self, context: HttpContext) -> None:
        """Returns the number of calls that generate or embed, as vLLM does."""
        num_calls = await self._view.num_calls(len(self._models.active))
        await context.respond(200, msgspec.json.encode({"server_load": num_calls}))

    async def _generate(
        self, context: HttpContext, answer: Callable[[Generator, HttpContext], Awaitable[None]]
    ) -> None:
        api = await self._models.of_call(context)
        card = api.backend.card
        if (card.forwards or card.forwards_all) and await api.forwarder.takes(context):
            return
        if not card.generates:
            raise _only_pools(api, context)
        await answer(api.generator, context)


def _only_pools(api: ModelApi, context: HttpContext) -> ApiError:
    path, others = context.scope["path"], ", ".join(api.backend.card.forwards)
    text = f"The model '{api.names[0]}' has no {path}: it generates no text. It has {others}."
    return ApiError(text, status=404, param="model", code="unsupported_endpoint")
