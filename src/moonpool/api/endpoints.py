"""The endpoints that generate nothing: models, tokens, health, metrics, explanations and drains."""

from __future__ import annotations

import importlib.metadata
from datetime import UTC, datetime
from typing import Any
from urllib.parse import parse_qs

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST

from moonpool.api.bodies import decode_body
from moonpool.api.body_process import Kind
from moonpool.api.call_headers import limits_of
from moonpool.api.cluster_view import CallBackend, ClusterView
from moonpool.api.errors import ApiError
from moonpool.api.http_context import HttpContext, scoped_id
from moonpool.api.models.model_apis import ModelApi, ModelApis
from moonpool.api.serving_backend import ApiOptions

DEFAULT_HOT = 20
MAX_HOT = 1000
_ID_PREFIXES = ("chatcmpl-", "cmpl-", "resp_", "msg_")


class Inspector:
    """Serves the endpoints that only read from one frontend."""

    def __init__(self, backend: CallBackend, view: ClusterView, models: ModelApis):
        self._backend, self._view = backend, view
        self._models = models

    async def models(self, context: HttpContext) -> None:
        data = [_described(api, name) for api in self._models.all() for name in api.names]
        await _respond(context, {"object": "list", "data": data, "has_more": False})

    async def model(self, context: HttpContext) -> None:
        name = context.scope["path_params"]["model_id"]
        await _respond(context, _described(self._models.named(name), name))

    async def health(self, context: HttpContext) -> None:
        await context.respond(503 if self._backend.not_ready() else 200, b"", b"text/plain")

    async def live(self, context: HttpContext) -> None:
        """Answers as long as the server's event loop turns; otherwise a supervisor restarts the
        server."""
        await _respond(context, {"live": True})

    async def ready(self, context: HttpContext) -> None:
        """Answers load balancers: 503 with the reason while requests should go to other servers."""
        reason = self._backend.not_ready()
        body = msgspec.json.encode({"ready": not reason, "reason": reason or None})
        await context.respond(503 if reason else 200, body)

    async def metrics(self, context: HttpContext) -> None:
        text = await self._view.metrics_text()
        await context.respond(200, text, CONTENT_TYPE_LATEST.encode())

    async def version(self, context: HttpContext) -> None:
        await _respond(context, {"version": installed_version()})

    async def server_info(self, context: HttpContext) -> None:
        info = await self._view.server_info()
        if not context.is_operator:
            slo = info.get("config", {}).get("slo")
            assumed = {key: info[key] for key in ("assumed_slos",) if key in info}
            info = {"model": info.get("model"), "config": {"slo": slo}} | assumed
        await _respond(context, info)

    async def cluster(self, context: HttpContext) -> None:
        tenant = None if context.is_operator else context.tenant
        await _respond(context, await self._view.cluster(tenant))

    async def hot(self, context: HttpContext) -> None:
        """Takes `?limit=N`, the most prefixes to return. Block keys do not reveal their tenant.

        Raises ApiError for a limit out of range.
        """
        text = _asked(context, "limit") or str(DEFAULT_HOT)
        if not text.isdigit() or not 1 <= int(text[:9]) <= MAX_HOT:
            raise ApiError(f"'limit' must be between 1 and {MAX_HOT}.", status=400, param="limit")
        found = await self._view.hot_prefixes(int(text))
        await _respond(context, {"prefixes": found})

    async def beliefs(self, context: HttpContext) -> None:
        """Shows what the Conductor assumes of each instance; `?model=NAME` chooses another model
        than the default. Raises ApiError for an unknown model."""
        name = _asked(context, "model")
        found = await self._view.beliefs(name)
        if found is None:
            raise self._no_model(name)
        await _respond(context, found)

    async def event_log(self, context: HttpContext) -> None:
        """The log holds the token ids of all tenants' prompts and answers. `?model=NAME` chooses
        the log of another model than the default. Raises ApiError for an unknown model."""
        name = _asked(context, "model")
        log = await self._view.event_log(name)
        if log is None:
            raise self._no_model(name)
        await context.respond(200, log, b"application/octet-stream")

    def _no_model(self, name: str | None) -> ApiError:
        """Returns the error of a page about a model that there is not yet. Raises ApiError for an
        unknown model."""
        self._models.named(name)
        return ApiError("There is no model yet.", status=404, code="model_not_found")

    async def explain(self, context: HttpContext) -> None:
        """Takes a request id or the id of a response. Raises ApiError (404) for an unknown id."""
        given_id = context.scope["path_params"]["request_id"]
        request_id = given_id
        for prefix in _ID_PREFIXES:
            request_id = request_id.removeprefix(prefix)
        tenant = context.tenant
        if context.is_operator:  # an operator may name another tenant: `?tenant=NAME`
            tenant = _asked(context, "tenant") or tenant
        found = await self._view.explain(scoped_id(tenant, request_id))
        if found is None:
            text = (
                f"The request '{given_id[:200]}' is unknown. The server keeps recent requests only."
            )
            raise ApiError(text, status=404, param="request_id", code="request_not_found")
        await _respond(context, found | {"request_id": request_id})

    async def tokenize(self, context: HttpContext) -> None:
        await self._respond_to_body("tokenize", context)

    async def tokenizer_info(self, context: HttpContext) -> None:
        """Returns the content of `tokenizer_config.json`, as vLLM shows it; `?model=NAME` chooses
        another model than the default."""
        api = self._models.named(_asked(context, "model"))
        await _respond(context, api.backend.tokenizer.describe())

    async def detokenize(self, context: HttpContext) -> None:
        await self._respond_to_body("detokenize", context)

    async def count_tokens(self, context: HttpContext) -> None:
        """Counts the prompt tokens of a message."""
        await self._respond_to_body("count_tokens", context)

    async def input_tokens(self, context: HttpContext) -> None:
        """Counts the prompt tokens of a response."""
        await self._respond_to_body("input_tokens", context)

    async def _respond_to_body(self, kind: Kind, context: HttpContext) -> None:
        api = await self._models.of_call(context)
        options = self._models.options
        timeout_s = limits_of(context, api.backend).timeout_s
        raw = await context.read_body(options.max_body_bytes, options.body_timeout_s)
        response = await api.bodies.respond(kind, raw, context.party, timeout_s)
        await context.respond(200, response)


def _described(api: ModelApi, name: str) -> dict[str, Any]:
    """Describes a model under one of its names, or one of its adapters."""
    card = api.backend.card
    root = next((a.root for a in card.adapters if a.name == name), None)
    return {
        "id": name,
        "object": "model",
        "created": card.created_s,
        "owned_by": "moonpool",
        "root": root or card.root or card.model_id,
        "parent": None if root is None else api.names[0],
        "max_model_len": card.max_model_tokens,
        "default_sampling_params": {
            name: int(value) if value == int(value) else value
            for name, value in card.sampling.items()
        },
        # Anthropic's names
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(card.created_s, UTC).isoformat(),
    }


def _asked(context: HttpContext, name: str) -> str | None:
    """Returns a field of the query, or None if it is not given."""
    query = parse_qs(context.scope.get("query_string", b"").decode("ascii", "replace"))
    values = query.get(name)
    return values[-1] if values else None


def installed_version() -> str:
    try:
        return importlib.metadata.version("moonpool")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


async def _respond(context: HttpContext, value: Any) -> None:
    await context.respond(200, msgspec.json.encode(value))


MAX_WITHIN_S = 3600.0


class DrainBody(msgspec.Struct):
    instance_id: str
    within_s: float = 60.0
    returns: bool = False


_DRAIN = msgspec.json.Decoder(DrainBody)


class Controller:
    """Serves the endpoints that change the cluster."""

    def __init__(self, view: ClusterView, options: ApiOptions):
        self._view = view
        self._options = options

    async def reset_prefix_cache(self, context: HttpContext) -> None:
        """Has all instances empty their prefix caches, as vLLM does. Responds before the caches are
        empty."""
        await self._view.drop_cached_blocks()
        await context.respond(200, b"", b"text/plain")

    async def drain(self, context: HttpContext) -> None:
        """Begins to drain an instance and responds at once; `/cluster` shows the progress.

        Raises ApiError for a body that is not valid, and for an instance that cannot be drained
        (409).
        """
        options = self._options
        body = decode_body(
            _DRAIN, await context.read_body(options.max_body_bytes, options.body_timeout_s)
        )
        if not 0 <= body.within_s <= MAX_WITHIN_S:
            text = f"'within_s' must be between 0 and {MAX_WITHIN_S:.0f} seconds."
            raise ApiError(text, status=400, param="within_s")
        refusal = await self._view.drain(body.instance_id, body.within_s, body.returns)
        if refusal:
            raise ApiError(refusal, status=409, param="instance_id", code="cannot_drain")
        await context.respond(200, msgspec.json.encode({"draining": body.instance_id}))

    async def upgrade(self, context: HttpContext) -> None:
        """Replaces the head by a head that runs the code on disk, and responds at once. `/cluster`
        shows the next head, or why none has started."""
        await self._view.upgrade()
        await context.respond(202, msgspec.json.encode({"upgrading": True}))
