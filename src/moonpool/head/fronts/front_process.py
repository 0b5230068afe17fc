"""Runs one front from start to end: the HTTP server of a head in a separate process."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from secrets import token_hex

import msgspec

from moonpool.api.app import make_front_app
from moonpool.api.cluster_view import ClusterView
from moonpool.api.models.model_apis import ModelApis
from moonpool.config.tables import Config
from moonpool.gc_tuning import settle_memory
from moonpool.head.fronts.front_answers import FrontAnswers
from moonpool.head.fronts.messages import FrontListens
from moonpool.head.fronts.remote_head import RemoteHead, RemoteModels, RemoteRates
from moonpool.head.serving import OwnCalls, serve_calls, start_serving
from moonpool.head.supervisor_link import SupervisorLink
from moonpool.link.auth import Identity, ServerHandshake
from moonpool.link.channel import Channel
from moonpool.link.tls import HANDSHAKE_S, PeerTls
from moonpool.log_limit import limited_logger
from moonpool.protocol.direct_tokens import DIRECT_SERVICE, DirectTokens, DirectWork, NothingSaid
from moonpool.types import InstanceId

log = limited_logger("moonpool.front")


async def serve_front(link: SupervisorLink) -> None:
    """Serves as a front of one cluster until the supervisor ends it. Raises ClusterError."""
    start = await start_serving(link)
    config, options = start.config, start.options
    head = RemoteHead(RemoteModels(config))
    answers = FrontAnswers(head)
    direct = DirectServer(start.inherited.begin.secret, head.on_tokens)
    head.listens = await _listen(direct, config, start.peer_tls)
    await head.connect(start.inherited.control)
    following = asyncio.create_task(_follow_heads(link, head))
    beat = asyncio.create_task(link.beat())
    await head.is_told.wait()
    models = ModelApis(head, options, RemoteRates(options.limits, head))
    app = make_front_app(head, ClusterView(head.question), options, models)
    calls = OwnCalls(link, start, app, models, answers, shares_port=True)
    settle_memory()
    await serve_calls(link, calls, head, (beat, following), config.api.drain_seconds)
    await calls.end()
    direct.close()
    head.close()
    beat.cancel()
    following.cancel()


async def _listen(direct: DirectServer, config: Config, tls: PeerTls | None) -> FrontListens | None:
    """Opens the port for direct tokens; returns None if all tokens come through the head."""
    try:
        port = await direct.listen(config.network.head_host, tls)
    except OSError as error:
        log.warning("instances cannot send tokens here directly: %s", error)
        return None
    return FrontListens(f"{os.getpid()}-{token_hex(4)}", port)


async def _follow_heads(link: SupervisorLink, head: RemoteHead) -> None:
    while True:
        await head.connect(await link.heads.get())


MAX_HALF_OPEN = 128
"""Most connections that have not yet proved that they know the secret. A new connection beyond that
ends the oldest one."""

DirectChannel = Channel[DirectTokens, NothingSaid]


class _InstanceConnection:
    """The channel's listener for the connection of one instance."""

    def __init__(self, server: DirectServer, secret: bytes) -> None:
        me = Identity(instance_id=InstanceId("front"), service=DIRECT_SERVICE, fingerprint=b"")
        self.channel: DirectChannel = Channel(
            ServerHandshake(secret, me), msgspec.msgpack.Decoder(DirectTokens), self
        )
        self._server = server

    def on_connected(self) -> None:
        self._server.on_connected(self)

    def on_open(self, peer: Identity) -> None:
        self._server.on_proved(self)

    def on_frame(self, frame: DirectTokens) -> None:
        for work in frame.attempts:
            self._server.on_tokens(work)

    def on_closed(self, reason: str) -> None:
        self._server.on_closed(self)


class DirectServer:
    """The port at which a front takes tokens from instances that prove the cluster's secret.
    `on_tokens` gets the tokens that instances send."""

    def __init__(self, secret: bytes, on_tokens: Callable[[DirectWork], None]) -> None:
        self.on_tokens = on_tokens
        self._secret = secret
        self._server: asyncio.Server | None = None
        self._half_open: dict[_InstanceConnection, None] = {}  # oldest first
        self._open: set[_InstanceConnection] = set()

    async def listen(self, host: str, tls: PeerTls | None) -> int:
        """Returns the number of the port. Raises OSError."""
        self._server = await asyncio.get_running_loop().create_server(
            lambda: _InstanceConnection(self, self._secret).channel,
            host,
            0,
            ssl=None if tls is None else tls.server,
            ssl_handshake_timeout=None if tls is None else HANDSHAKE_S,
        )
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for connection in self._open:
            connection.channel.close()

    def on_connected(self, connection: _InstanceConnection) -> None:
        if len(self._half_open) >= MAX_HALF_OPEN:
            oldest = next(iter(self._half_open))
            oldest.channel.abort("too many connections that have not proved the secret")
            self._half_open.pop(oldest, None)
        self._half_open[connection] = None

    def on_proved(self, connection: _InstanceConnection) -> None:
        self._half_open.pop(connection, None)
        self._open.add(connection)

    def on_closed(self, connection: _InstanceConnection) -> None:
        self._half_open.pop(connection, None)
        self._open.discard(connection)
