"""The endpoints that compute, one set for each model of the head, and the choice of a set by the
`model` field of a call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, runtime_checkable

import msgspec

from moonpool.api.body_pool import BodyReader
from moonpool.api.body_reading.client import BodyClient
from moonpool.api.cluster_view import CallBackend, ClusterView
from moonpool.api.embeddings import Embedder
from moonpool.api.errors import ApiError
from moonpool.api.generate import Generator
from moonpool.api.http_context import ActiveCalls, HttpContext
from moonpool.api.models.forwarding import Forwarder
from moonpool.api.preparation import check_model
from moonpool.api.rate_limits import RateLimits
from moonpool.api.serving_backend import ApiOptions, ModelBackend, RequestRefused
from moonpool.protocol.model_offer import POOLING_PATHS
from moonpool.types import MALFORMED

NO_MODEL_RETRY_S = 5.0


class _Named(msgspec.Struct):
    model: str | None = None


_NAMED = msgspec.json.Decoder(_Named)


@runtime_checkable
class StartedBackend(Protocol):
    """A `ModelBackend` that has started a process which reads bodies."""

    def take_reader(self) -> BodyClient | None:
        """Returns, once, a process that has loaded the model's tokenizer already, or None if none
        was started."""
        ...


class ModelApi:
    """The endpoints that serve one model."""

    def __init__(
        self, backend: ModelBackend, shared: ApiOptions, active: ActiveCalls, rates: RateLimits
    ) -> None:
        self.backend = backend
        self.options = backend.options(shared)
        reader = backend.take_reader() if isinstance(backend, StartedBackend) else None
        self.bodies = BodyReader(backend, self.options, reader)
        own = backend, self.options, self.bodies, active, rates
        self.generator, self.embedder = Generator(*own), Embedder(*own)
        self.forwarder = Forwarder(*own)

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names that clients may use, starting with the model's own."""
        return self.options.names(self.backend.card)

    def is_named(self, name: str | None) -> bool:
        return name is None or name in self.options.accepted(self.backend.card)

    def has(self, path: str) -> bool:
        """Whether the model answers calls of this endpoint."""
        card = self.backend.card
        if path in card.forwards:
            return True
        if path in POOLING_PATHS:
            return path == "/v1/embeddings" and card.embedding_size > 0
        return card.generates


def meant_api(apis: Sequence[ModelApi], raw: bytes, path: str) -> ModelApi:
    """Returns the model's endpoints that a call means by its body. If the body names no model, this
    is the first model that has the endpoint; if it is not JSON, the first of all. Raises ApiError
    (404) if no name fits."""
    try:
        name = _NAMED.decode(raw).model
    except MALFORMED:
        return apis[0]
    named = [api for api in apis if api.is_named(name)]
    if not named:
        check_model(name, [each for api in apis for each in api.names])
    return next((api for api in named if api.has(path)), named[0])


class ModelApis:
    """The endpoints of all models of a server. `close` ends the processes of all models."""

    def __init__(
        self, backend: CallBackend, options: ApiOptions, rates: RateLimits | None = None
    ) -> None:
        self.options = options
        self.active = ActiveCalls()
        self._backend = backend
        self._rates = rates or RateLimits(options.limits)
        self._apis: dict[int, ModelApi] = {}

    def all(self) -> Sequence[ModelApi]:
        """Returns the endpoints in the order in which the models came."""
        return [self._api(model) for model in self._backend.models()]

    async def of_call(self, context: HttpContext) -> ModelApi:
        """Returns the endpoints that a call means by its body. A call whose body names no model
        goes to the first model that has the endpoint; a body that is not JSON goes to the default,
        which reports what is wrong with it.

        Raises ApiError, including (404) for a model that no name fits, RequestRefused (503) if no
        model exists yet, and the errors of `read_body`.
        """
        apis = self._present()
        if len(apis) == 1:
            return apis[0]
        raw = await context.read_ahead(self.options.max_body_bytes, self.options.body_timeout_s)
        return meant_api(apis, raw, context.scope["path"])

    def named(self, name: str | None) -> ModelApi:
        """Returns the endpoints of the model with this name; None means the default. Raises
        ApiError (404), and RequestRefused (503) if no default exists yet."""
        apis = self._present() if name is None else self.all()
        found = next((api for api in apis if api.is_named(name)), None)
        if found is None:
            check_model(name, [each for api in apis for each in api.names])
        assert found is not None
        return found

    def close(self) -> None:
        for api in self.all():
            api.bodies.close()

    def _present(self) -> Sequence[ModelApi]:
        apis = self.all()
        if not apis:
            text = "No vLLM server has joined yet. Send the request again later."
            raise RequestRefused(503, "no_instance", text, NO_MODEL_RETRY_S)
        return apis

    def _api(self, model: ModelBackend) -> ModelApi:
        found = self._apis.get(id(model))
        if found is None:
            found = self._apis[id(model)] = ModelApi(model, self.options, self.active, self._rates)
        return found


class ModelCalls:
    """The computing endpoints as routes: each call goes to the model that it names, and there to
    the part that answers it."""

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
