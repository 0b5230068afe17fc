"""The HTTP application: which path leads where, who may pass, and what an exception becomes.

Only the door: what an endpoint does is in `generate` and `inspect`.
"""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Mapping

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Receive, Scope, Send

from moonpool.api.control import Controller
from moonpool.api.errors import ApiError, ClientGoneError, from_refused, internal_error
from moonpool.api.exchange import Exchange, request_id_of
from moonpool.api.frontend import Frontend, Refused
from moonpool.api.generate import Generator
from moonpool.api.inspect import Inspector
from moonpool.api.options import ApiOptions

logger = logging.getLogger(__name__)
Handler = Callable[[Exchange], Awaitable[None]]


def make_app(frontend: Frontend, options: ApiOptions | None = None) -> Starlette:
    """The OpenAI-compatible API over one frontend. Everything runs on the caller's event loop."""
    options = options or ApiOptions()
    generator = Generator(frontend, options)
    inspector = Inspector(frontend, options)
    controller = Controller(frontend, options)

    def route(path: str, handler: Handler, *methods: str, open_to_all: bool = False) -> BaseRoute:
        keys = {} if open_to_all else options.api_keys
        return Route(path, _Endpoint(handler, keys), methods=methods or ("GET",))

    app = Starlette(
        routes=[
            route("/v1/chat/completions", generator.chat, "POST"),
            route("/v1/completions", generator.complete, "POST"),
            route("/v1/responses", generator.respond, "POST"),
            route("/v1/models", inspector.models),
            route("/v1/models/{model_id:path}", inspector.model),
            route("/tokenize", inspector.tokenize, "POST"),
            route("/detokenize", inspector.detokenize, "POST"),
            route("/health", inspector.health, open_to_all=True),
            route("/ping", inspector.health, "GET", "POST", open_to_all=True),
            route("/metrics", inspector.metrics, open_to_all=True),
            route("/version", inspector.version, open_to_all=True),
            route("/server_info", inspector.server_info),
            route("/explain/{request_id}", inspector.explain),
            route("/cluster", inspector.cluster),
            route("/cluster/hot", inspector.hot),
            route("/cluster/drain", controller.drain, "POST"),
            route("/beliefs", inspector.beliefs),
            route("/", inspector.page, open_to_all=True),
        ],
        exception_handlers={HTTPException: _routing_error},
    )
    app.router.redirect_slashes = False
    return app


class _Endpoint:
    """One handler behind its key check, as a bare ASGI application."""

    def __init__(self, handler: Handler, api_keys: Mapping[str, str]):
        self._handler = handler
        self._keys = [(key.encode(), tenant) for key, tenant in api_keys.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send)
        try:
            if self._keys:
                exchange.tenant = self._tenant(exchange)
            await self._handler(exchange)
        except ClientGoneError:
            return
        except ApiError as error:
            await _respond(exchange, error)
        except Refused as refused:
            await _respond(exchange, from_refused(refused))
        except Exception:
            logger.exception("request %s failed", exchange.request_id)
            await _respond(exchange, internal_error(exchange.request_id))

    def _tenant(self, exchange: Exchange) -> str:
        """Compares with every key, in the same time whichever fits."""
        scheme, _, given = exchange.headers.get(b"authorization", b"").partition(b" ")
        found: str | None = None
        for key, tenant in self._keys:
            if hmac.compare_digest(key, given.strip()) and scheme.lower() == b"bearer":
                found = tenant
        if found is None:
            raise ApiError(
                "This server needs a valid API key: send 'Authorization: Bearer KEY'.",
                status=401,
                code="invalid_api_key",
                headers=((b"www-authenticate", b"Bearer"),),
            )
        return found


async def _respond(exchange: Exchange, error: ApiError) -> None:
    if exchange.started:  # too late for another status; the connection ends short
        return
    await exchange.respond(error.status, error.payload(), headers=error.headers)


async def _routing_error(request: HttpRequest, error: Exception) -> Response:
    """Starlette's own 404 and 405, in OpenAI's shape."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == 405:
        text, code = f"{request.method} is not allowed on {path}.", "method_not_allowed"
    else:
        text, code = f"There is nothing at {path}.", "not_found"
    payload = ApiError(text, status=error.status_code, code=code).payload()
    headers = {**(error.headers or {}), "x-request-id": request_id_of(request.scope)}
    return Response(payload, error.status_code, headers, "application/json")
