"""Runs one front from start to end: the HTTP server of a head in another process."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from secrets import token_hex

from moonpool.api.access.protection import UNPROTECTED, open_keys, open_peer_tls, open_tls
from moonpool.api.app import http_server, make_front_app
from moonpool.api.models.model_apis import ModelApis
from moonpool.config.tables import Config
from moonpool.gc_tuning import settle_memory
from moonpool.head.cluster import api_options, note_failure, resolved
from moonpool.head.cluster_error import ClusterError
from moonpool.head.fronts.direct_server import DirectServer
from moonpool.head.fronts.front_answers import FrontAnswers
from moonpool.head.fronts.messages import FrontListens
from moonpool.head.fronts.remote_head import RemoteHead, RemoteRates
from moonpool.head.fronts.remote_models import RemoteModels
from moonpool.head.fronts.remote_view import RemoteView
from moonpool.head.supervisor_link import SupervisorLink
from moonpool.link.tls import PeerTls
from moonpool.log_limit import limited_logger

log = limited_logger("moonpool.front")

END_S = 5


async def serve_front(link: SupervisorLink) -> None:
    """Serves as a front of one cluster until the supervisor ends it. Raises ClusterError."""
    inherited = await link.inherit()
    config = resolved(inherited.begin.config)
    try:
        tls, peer_tls, keys = open_tls(config), open_peer_tls(config), open_keys(config)
    except UNPROTECTED as error:
        raise ClusterError(str(error)) from None
    options = api_options(config, keys)
    head = RemoteHead(RemoteModels(config))
    answers = FrontAnswers(head)
    answers.enders = link.enders
    direct = DirectServer(inherited.begin.secret, head.on_tokens)
    head.listens = await _listen(direct, config, peer_tls)
    await head.connect(inherited.control)
    following = asyncio.create_task(_follow_heads(link, head))
    beat = asyncio.create_task(link.beat())
    await head.is_told.wait()
    models = ModelApis(head, options, RemoteRates(options.limits, head))
    for kept in inherited.cut_answers:
        answers.adopt(kept)
    app = make_front_app(head, RemoteView(head), options, models)
    server = http_server(
        app, END_S, tls=tls, keeper=link, answers=answers, mark=link.mark, shares_port=True
    )
    settle_memory()
    for received, sock in inherited.answers:
        await server.resume(sock, received)
    for sock in inherited.connections:
        await server.adopt(sock)
    broken: list[str] = []
    serving = asyncio.create_task(server.serve(sockets=[inherited.http]))
    for task in (serving, beat, following):
        task.add_done_callback(partial(note_failure, broken, link.stop))
    link.up()
    await link.stop.wait()
    if broken:  # the next front continues the answers
        raise ClusterError(broken[0])
    if link.hands_over:
        head.end_views()
        await server.hand_over(link.pass_on, config.api.drain_seconds)
        models.close()
        await link.flush()
        os._exit(0)  # at once: an orderly end would end the answers, which go on
    server.should_exit = True
    await asyncio.wait([serving])
    models.close()
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
