"""The endpoints that compute, as routes: each call goes to the model that it means."""

from __future__ import annotations

import msgspec

from moonpool.api.http_context import HttpContext
from moonpool.api.models.model_apis import ModelApis


class ModelCalls:
    def __init__(self, models: ModelApis) -> None:
        self._models = models

    async def chat(self, context: HttpContext) -> None:
        await (await self._models.of_call(context)).generator.chat(context)

    async def complete(self, context: HttpContext) -> None:
        await (await self._models.of_call(context)).generator.complete(context)

    async def respond(self, context: HttpContext) -> None:
        await (await self._models.of_call(context)).generator.respond(context)

    async def message(self, context: HttpContext) -> None:
        await (await self._models.of_call(context)).generator.message(context)

    async def embed(self, context: HttpContext) -> None:
        await (await self._models.of_call(context)).embedder.embed(context)

    async def load(self, context: HttpContext) -> None:
        """Returns the number of calls that generate or embed, as vLLM does."""
        await context.respond(200, msgspec.json.encode({"server_load": len(self._models.active)}))
