"""Runs one front from start to end: the HTTP server of a head in another process."""

from __future__ import annotations

import asyncio
import os
from secrets import token_hex

from moonpool.api.app import make_front_app
from moonpool.api.cluster_view import ClusterView
from moonpool.api.models.model_apis import ModelApis
from moonpool.config.tables import Config
from moonpool.gc_tuning import settle_memory
from moonpool.head.fronts.direct_server import DirectServer
from moonpool.head.fronts.front_answers import FrontAnswers
from moonpool.head.fronts.messages import FrontListens
from moonpool.head.fronts.remote_head import RemoteHead, RemoteModels, RemoteRates
from moonpool.head.serving import OwnCalls, serve_calls, start_serving
from moonpool.head.supervisor_link import SupervisorLink
from moonpool.link.tls import PeerTls
from moonpool.log_limit import limited_logger

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
    """None: all tokens come by the head."""
    try:
        port = await direct.listen(config.network.head_host, tls)
    except OSError as error:
        log.warning("instances cannot send tokens here directly: %s", error)
        return None
    return FrontListens(f"{os.getpid()}-{token_hex(4)}", port)


async def _follow_heads(link: SupervisorLink, head: RemoteHead) -> None:
    while True:
        await head.connect(await link.heads.get())
