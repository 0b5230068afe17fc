"""Runs one picker from start to end: its source of endpoints, its gRPC port, and its HTTP port."""

from __future__ import annotations

import asyncio
import logging
import socket

from msgspec.structs import replace

from moonpool.api.access.protection import open_keys, open_tls
from moonpool.api.app import http_server, make_app
from moonpool.api.serving_backend import ApiOptions
from moonpool.config.tables import Config
from moonpool.discovery.endpoint import Listing
from moonpool.discovery.sources import EndpointSource
from moonpool.epp.picker import Picker
from moonpool.epp.server import GrpcPort, GrpcServer
from moonpool.gc_tuning import settle_memory
from moonpool.head.head_drain import drain
from moonpool.head.models.model_loading import ApiModel, load_offered, named_offer
from moonpool.head.serving import resolved

log = logging.getLogger("moonpool")
logging.getLogger("uvicorn.error").setLevel(logging.WARNING)  # uvicorn would log its own start

LAST_S = 1.0


async def serve_picker(
    config: Config,
    source: EndpointSource,
    place: GrpcPort,
    http: socket.socket,
    stop: asyncio.Event,
    fails_open: bool,
    api_key: str,
    num_fallbacks: int = 0,
) -> None:
    """Serves until `stop` is set. Raises ClusterError, SourceError, GrpcStartError, and the errors
    of `open_keys` and `open_tls`."""
    config = resolved(config)
    keys, tls = open_keys(config), open_tls(config)
    options = ApiOptions(
        api_keys=keys.tenants,
        operators=keys.operators,
        max_body_bytes=config.api.max_body_bytes,
        allowed_hosts=config.api.allowed_hosts,
        exports_traces=bool(config.telemetry.otlp_traces_endpoint),
    )
    picker = Picker(config, options, api_key, num_fallbacks, await _named_model(config))
    await picker.start()
    grpc = GrpcServer(picker, place, fails_open)
    app = make_app(picker.head, options, picker.models, answers_calls=False)
    web = http_server(app, tls=tls)
    tasks: list[asyncio.Task[None]] = []
    try:
        await grpc.start()
        listed = asyncio.Event()

        def update(listing: Listing) -> None:
            picker.update(listing)
            listed.set()

        tasks += [
            asyncio.create_task(source.follow(update)),
            asyncio.create_task(grpc.run()),
            asyncio.create_task(web.serve(sockets=[http])),
            asyncio.create_task(_wait(stop)),
        ]
        settle_memory()
        log.info(
            "picking endpoints at %s:%d (gRPC); /metrics and /cluster at port %d (Ctrl-C ends it)",
            *(place.host, grpc.port, http.getsockname()[1]),
        )
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
        log.info("stopping")
        await drain(picker.head, config.api.drain_seconds)
    finally:
        await grpc.stop(LAST_S)
        web.should_exit = True
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await picker.stop()


async def _named_model(config: Config) -> ApiModel | None:
    """Reads the model that the configuration names. If the tokens of the model are unknown here,
    they are estimated. Raises ClusterError."""
    name = config.model.name
    if not name:
        return None
    offer = replace(named_offer(name), takes="either")
    return await load_offered(config, offer, is_first=True)


async def _wait(stop: asyncio.Event) -> None:
    await stop.wait()
