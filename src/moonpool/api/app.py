"""The HTTP application and its server: routes and errors.

The endpoints themselves are in `generate` and `endpoints`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterator
from email.utils import formatdate
from functools import partial
from typing import cast

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from moonpool.api import messages
from moonpool.api.access.admission import CallerCheck
from moonpool.api.access.route_rules import RouteRule, rule_of
from moonpool.api.cluster_view import CallBackend, ClusterView, own_view
from moonpool.api.connection.acceptor import MOST_AT_ONCE, Acceptor
from moonpool.api.connection.call_log import StreamKeeper
from moonpool.api.connection.http_protocol import LimitedProtocol, limited_protocol
from moonpool.api.connection.kept_answers import KeptAnswers
from moonpool.api.connection.kept_stream import HalfRead, KeptStream, accepted_bytes
from moonpool.api.connection.poison import WorkMark
from moonpool.api.connection.tls import TlsFiles
from moonpool.api.endpoints import Controller, Inspector
from moonpool.api.errors import ApiError, ClientGoneError, from_refused, internal_error
from moonpool.api.http_context import HttpContext, request_id_of
from moonpool.api.messages import ErrorPayload
from moonpool.api.models.model_apis import ModelApis, ModelCalls
from moonpool.api.openapi import openapi_document
from moonpool.api.page.live_page import HtmlPage, LivePage
from moonpool.api.serving_backend import ApiOptions, RequestRefused, ServingBackend
from moonpool.api.sharing.shared_buffer import BodyMemory
from moonpool.protocol.model_offer import POOLING_PATHS

logger = logging.getLogger(__name__)
HAND_OVER_LOOK_S = 0.01
RENEWAL_S = 2.0
"""Time between two checks of the certificate's files."""
GENERATING = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    *POOLING_PATHS,
}
"""Paths whose refusals count as refused requests."""
EMBEDDINGS = "/v1/embeddings"
NOT_WITHOUT_CALLS = {
    *GENERATING,
    "/v1/messages/count_tokens",
    "/v1/responses/input_tokens",
    "/cluster/upgrade",
}
"""Paths that only a server that answers calls has."""
Handler = Callable[[HttpContext], Awaitable[None]]


def make_app(
    backend: ServingBackend,
    options: ApiOptions | None = None,
    models: ModelApis | None = None,
    answers_calls: bool = True,
) -> Starlette:
    """Makes an app as `make_front_app` does, for a head in this process."""
    return make_front_app(backend, own_view(backend), options, models, answers_calls)


def make_front_app(
    backend: CallBackend,
    view: ClusterView,
    options: ApiOptions | None = None,
    models: ModelApis | None = None,
    answers_calls: bool = True,
) -> Starlette:
    """Returns the OpenAI-compatible API over one frontend; it runs on the caller's event loop.

    `models` is closed by the caller. `answers_calls`: if it is False, only the endpoints that show
    and steer the cluster exist. Raises NoRuleError for a route that `route_rules` lacks.
    """
    options = options or ApiOptions()
    models = models or ModelApis(backend, options)
    memory, access = BodyMemory(options.max_body_bytes), CallerCheck(options)
    calls, inspector = ModelCalls(models, view), Inspector(backend, view, models)
    controller, live_page = Controller(view, options), LivePage(backend, view)

    async def openapi(context: HttpContext) -> None:
        await context.respond(200, openapi_document(app.routes))

    def route(
        path: str, handler: Handler, *methods: str, payload_of: ErrorPayload = _openai_payload
    ) -> Route:
        counter = backend if path in GENERATING else None
        endpoint = _Endpoint(handler, access, rule_of(path), memory, payload_of, counter)
        return Route(path, endpoint, methods=methods or ("GET",))

    message_route = partial(route, payload_of=messages.error_payload)
    routes = [
        route("/v1/chat/completions", calls.chat, "POST"),
        route("/v1/completions", calls.complete, "POST"),
        route(EMBEDDINGS, calls.embed, "POST"),
        *(route(path, calls.pool, "POST") for path in POOLING_PATHS if path != EMBEDDINGS),
        route("/v1/responses", calls.respond, "POST"),
        route("/v1/responses/input_tokens", inspector.input_tokens, "POST"),
        message_route("/v1/messages", calls.message, "POST"),
        message_route("/v1/messages/count_tokens", inspector.count_tokens, "POST"),
        route("/load", calls.load),
        route("/openapi.json", openapi),
        route("/v1/models", inspector.models),
        route("/v1/models/{model_id:path}", inspector.model),
        route("/tokenize", inspector.tokenize, "POST"),
        route("/detokenize", inspector.detokenize, "POST"),
        route("/tokenizer_info", inspector.tokenizer_info),
        route("/health", inspector.health),
        route("/ping", inspector.health, "GET", "POST"),
        route("/live", inspector.live),
        route("/ready", inspector.ready),
        route("/metrics", inspector.metrics),
        route("/version", inspector.version),
        route("/server_info", inspector.server_info),
        route("/explain/{request_id}", inspector.explain),
        route("/cluster", inspector.cluster),
        route("/cluster/hot", inspector.hot),
        route("/reset_prefix_cache", controller.reset_prefix_cache, "POST"),
        route("/cluster/drain", controller.drain, "POST"),
        route("/cluster/upgrade", controller.upgrade, "POST"),
        route("/beliefs", inspector.beliefs),
        route("/cluster/events", live_page.events),
        route("/cluster/event_log", inspector.event_log),
        route("/docs", HtmlPage("docs_page.html").send),
        route("/", HtmlPage("live_page.html").send),
    ]
    if not answers_calls:
        routes = [each for each in routes if each.path not in NOT_WITHOUT_CALLS]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _routing_error})
    _settle_paths(app)
    _allow_origins(app, options.allowed_origins)
    return app


_ALSO_WITHOUT_V1 = frozenset({"/v1/chat/completions", "/v1/responses", "/v1/models"})
"""Clients of llama.cpp leave out /v1 before these paths. Other paths without /v1, such as
/completions and /embeddings, have other meanings in llama.cpp."""


def _settle_paths(app: Starlette) -> None:
    app.router.redirect_slashes = False
    app.router.routes += [
        Route(
            route.path.removeprefix("/v1"),
            route.endpoint,
            methods=sorted(route.methods or ()),
            include_in_schema=False,
        )
        for route in app.routes
        if isinstance(route, Route) and route.path in _ALSO_WITHOUT_V1
    ]


def _allow_origins(app: Starlette, origins: tuple[str, ...]) -> None:
    """Allows web pages of these origins, if there are any, to call the API."""
    if not origins:
        return
    app.add_middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "x-moonpool-timing", "retry-after"],
    )


def _openai_payload(error: ApiError, _request_id: str) -> bytes:
    return error.payload()


class _Endpoint:
    """A bare ASGI application: admits a request by its route's rule, calls one handler, and reports
    its errors."""

    def __init__(
        self,
        handler: Handler,
        access: CallerCheck,
        rule: RouteRule,
        memory: BodyMemory,
        payload_of: ErrorPayload,
        counter: CallBackend | None,
    ):
        """`payload_of` writes an error in the endpoint's format. `counter` counts refusals that the
        head does not know, or is None for an endpoint whose refusals do not count as refused
        requests."""
        self._handler = handler
        self._access = access
        self._rule = rule
        self._memory = memory
        self._payload_of = payload_of
        self._counter = counter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = HttpContext(scope, receive, send, self._memory)
        try:
            await self._access.admit(context, self._rule)
            await self._handler(context)
        except ClientGoneError:
            return
        except ApiError as error:
            if error.status == 503 and not error.is_counted:
                self._note_refused(error.code)
            await self._respond(context, error)
        except RequestRefused as refused:
            if not refused.is_counted:
                self._note_refused(refused.refusal.reason)
            await self._respond(context, from_refused(refused))
        except asyncio.CancelledError:  # the server is ending, so this is not the client's doing
            text = "The server has stopped. Send the request again."
            await self._respond(context, ApiError(text, status=503, code="server_stopping"))
        except Exception:
            logger.exception("request %s failed", context.request_id)
            await self._respond(context, internal_error(context.request_id))
        finally:
            context.close()

    def _note_refused(self, reason: str | None) -> None:
        if self._counter is not None and reason is not None:
            self._counter.note_refused(reason)

    async def _respond(self, context: HttpContext, error: ApiError) -> None:
        if context.started:  # the status line has been sent, so the connection ends early instead
            return
        payload = self._payload_of(error, context.request_id)
        await context.respond(error.status, payload, headers=error.headers)


async def _routing_error(request: HttpRequest, error: Exception) -> Response:
    """Returns Starlette's 404 and 405 in OpenAI's format."""
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    if error.status_code == 405:
        text, code = f"{request.method} is not allowed on {path}.", "method_not_allowed"
    else:
        text, code = f"The path {path} does not exist on this server.", "not_found"
    payload = ApiError(text, status=error.status_code, code=code).payload()
    headers = {**(error.headers or {}), "x-request-id": request_id_of(request.scope)}
    return Response(payload, error.status_code, headers, "application/json")


class DatedState(ServerState):
    """uvicorn's state of a server, with the present date in the headers of each response."""

    def __init__(self, config: uvicorn.Config) -> None:
        self._config = config
        self._second = 0
        self._headers: list[tuple[bytes, bytes]] = []
        super().__init__()

    @property
    def default_headers(self) -> list[tuple[bytes, bytes]]:
        now_s = time.time()
        if int(now_s) != self._second:
            self._second = int(now_s)
            date = (b"date", formatdate(now_s, usegmt=True).encode())
            self._headers = [date, *self._config.encoded_headers]
        return self._headers

    @default_headers.setter
    def default_headers(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Ignores what uvicorn sets: the list is built again in each second in which it is read."""


class HttpServer(uvicorn.Server):
    """`await serve(sockets=[...])` returns after `should_exit` is set. `HttpServer` handles no
    signals."""

    def __init__(
        self, config: uvicorn.Config, tls: TlsFiles | None = None, shares_port: bool = False
    ) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._exit = asyncio.Event()
        super().__init__(config)
        self.server_state = DatedState(config)
        self._tls = tls
        self._most_at_once = 1 if shares_port else MOST_AT_ONCE

    @property
    def should_exit(self) -> bool:
        return self._exit.is_set()

    @should_exit.setter
    def should_exit(self, wanted: bool) -> None:
        """May be set from any thread."""
        if wanted and self._loop is not None:
            self._loop.call_soon_threadsafe(self._exit.set)
        elif wanted:
            self._exit.set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Accepts connections. With a keeper and without TLS, holds each connection from its first
        moment in such a way that another head can continue it."""
        keeps = self._protocol_class().keeper is not None and self._tls is None
        await super().startup([] if keeps else sockets)
        if keeps:
            acceptors = [Acceptor(sock, self._begin, self._most_at_once) for sock in sockets or ()]
            self.servers = cast(list[asyncio.Server], acceptors)  # uvicorn closes these acceptors

    def _begin(self, sock: socket.socket) -> LimitedProtocol:
        protocol_class = self._protocol_class()
        half_read = protocol_class.hold(sock)
        protocol = self._new_protocol()
        protocol.start_with(half_read)
        return protocol

    async def resume(self, sock: socket.socket, received: KeptStream | HalfRead) -> None:
        """Continues a call that another head has received, or has begun to receive."""
        num_sent = accepted_bytes(sock.fileno()) - received.base
        if num_sent < 0:  # bytes of an earlier response were lost
            received.drop()
            sock.close()
            return
        protocol = self._new_protocol()
        protocol.resume(received, num_sent)
        await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, sock)

    async def adopt(self, sock: socket.socket) -> None:
        """Serves a connection of another head on which no call is under way."""
        protocol = self._new_protocol()
        await asyncio.get_running_loop().connect_accepted_socket(lambda: protocol, sock)
        protocol.await_next()

    async def hand_over(self, give: Callable[[int], None], calls_s: float) -> None:
        """Accepts no more connections, and gives away the file descriptors of connections without a
        call. Returns when all other connections have kept answers; calls without an answer may take
        `calls_s`."""
        for listener in self.servers:
            listener.close()
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while True:
            waits = [connection.leave(give) for connection in self._connections()]
            if loop.time() - began_s >= min(max(waits, default=0.0), calls_s):
                return
            await asyncio.sleep(HAND_OVER_LOOK_S)

    def _connections(self) -> list[LimitedProtocol]:
        return [c for c in self.server_state.connections if isinstance(c, LimitedProtocol)]

    def _protocol_class(self) -> type[LimitedProtocol]:
        if not self.config.loaded:
            self.config.load()
        protocol_class = self.config.http_protocol_class
        assert issubclass(protocol_class, LimitedProtocol)
        return protocol_class

    def _new_protocol(self) -> LimitedProtocol:
        return self._protocol_class()(
            config=self.config,
            server_state=self.server_state,
            app_state={},
            _loop=asyncio.get_running_loop(),
        )

    async def main_loop(self) -> None:
        """Waits until `should_exit` is set. (The loop of uvicorn runs ten times a second.)"""
        self._loop = asyncio.get_running_loop()
        while not self._exit.is_set():
            if self._tls is not None:
                self._tls.renew()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if self._tls is None else RENEWAL_S):
                    await self._exit.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(
    app: Starlette,
    drain_s: int = 5,
    tls: TlsFiles | None = None,
    keeper: StreamKeeper | None = None,
    answers: KeptAnswers | None = None,
    mark: WorkMark | None = None,
    shares_port: bool = False,
) -> HttpServer:
    """Returns the server. Responses may go on for `drain_s` seconds after `should_exit`.

    With `tls` it serves HTTPS alone. `keeper` holds the logs of `answers`. `mark` shows which call
    is being processed. `shares_port`: whether other processes accept on the same socket.
    """
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=limited_protocol(keeper=keeper, answers=answers, mark=mark),
        ws="none",
        # the client's address is the connection's, whatever a header says
        proxy_headers=False,
        lifespan="off",
        access_log=False,
        log_config=None,  # uvicorn would otherwise set up logging for the whole process
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=drain_s,
    )
    if tls is not None:
        config.load()
        config.ssl = tls.context
    return HttpServer(config, tls, shares_port)
