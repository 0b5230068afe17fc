"""Runs one head from start to end: the Conductor's driver and the HTTP server."""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial

import msgspec

from moonpool.api.app import http_server, make_app
from moonpool.api.connection.tls import TlsError, TlsFiles
from moonpool.api.frontend import ApiOptions
from moonpool.api.keys import NO_KEYS, ApiKeys, KeyFileError, read_keys
from moonpool.api.models.model_apis import ModelApis
from moonpool.config import Config, ConfigError
from moonpool.config_rules import check_values
from moonpool.cores import (
    CoreShare,
    format_cores,
    pin_thread,
    read_cores,
    share_cores,
    threads_per_process,
    usable_cores,
)
from moonpool.gc_tuning import settle_memory
from moonpool.runtime.cluster_error import ClusterError
from moonpool.runtime.head import Head
from moonpool.runtime.head_drain import drain
from moonpool.runtime.models.model_loading import load_model
from moonpool.runtime.supervisor_link import Inheritance, SupervisorLink
from moonpool.transfer.tls import PeerTls, PeerTlsError

log = logging.getLogger("moonpool")

START_S = 300.0


async def serve_cluster(link: SupervisorLink) -> None:
    """Serves as the head of one cluster until the supervisor ends it. Raises ClusterError."""
    inherited = await link.inherit()
    begin = inherited.begin
    config = resolved(begin.config)
    tls, peer_tls = _tls(config), _peer_tls(config)
    try:
        keys = read_keys(config.api.api_keys, config.api.api_key_file, os.environ)
    except KeyFileError as error:
        raise ClusterError(str(error)) from None
    head = _make_head(config, begin.secret, keys)
    head.on_silent, head.on_instances = link.kill, link.know
    head.succession, head.num_restarts = link, begin.num_restarts
    head.num_upgrades, head.standbys.epoch = begin.num_upgrades, begin.epoch
    await head.start(inherited.control, peer_tls)
    head.expect(begin.expected, begin.offers)
    models = ModelApis(head, _api_options(config, keys))
    for kept in inherited.cut_answers:
        head.standbys.answers.adopt(kept)
    app = make_app(head, models.options, models)
    server = http_server(app, tls=tls, keeper=link, answers=head.standbys.answers)
    beat = asyncio.create_task(link.beat())
    await _begin(link, head, config, inherited)
    for received, sock in inherited.answers:
        await server.resume(sock, received)
    for sock in inherited.connections:
        await server.adopt(sock)
    broken: list[str] = []
    serving = asyncio.create_task(server.serve(sockets=[inherited.http]))
    for task in (serving, head.ticker, beat):
        task.add_done_callback(partial(_note_failure, broken, link.stop))
    if not link.stop.is_set():
        link.up()
        await link.stop.wait()
    if broken:  # the next head goes on with the workers and the answers
        raise ClusterError(broken[0])
    if link.hands_over:
        head.end_views()
        await server.hand_over(link.pass_on, config.api.drain_seconds)
        models.close()
        await link.flush()
        os._exit(0)  # at once: an end in order would end the answers, which go on
    log.info("stopping")
    await drain(head, config.api.drain_seconds)
    link.ending()
    server.should_exit = True
    await asyncio.wait([serving])
    models.close()
    await head.stop()
    beat.cancel()


async def _begin(link: SupervisorLink, head: Head, config: Config, inherited: Inheritance) -> None:
    """Waits for the workers of the first head, and says where the cluster is. A further head serves
    at once: its requests wait for the workers."""
    begin = inherited.begin
    shares = _shares(config) if begin.launch else []
    link.prepared(shares, threads_per_process(config))
    if begin.launch:
        pin_thread(shares[0].others if shares else ())
    if begin.is_first and begin.launch:
        await _wait_for_workers(head, config.cluster.num_instances, link.stop)
    if begin.is_first and not begin.launch:
        log.info("waiting for workers at %s:%d", *inherited.control.getsockname()[:2])
    settle_memory()
    if not link.stop.is_set():
        host = f"[{config.api.host}]" if ":" in config.api.host else config.api.host
        scheme = "https" if config.api.ssl_certfile else "http"
        url = f"{scheme}://{host}:{inherited.http.getsockname()[1]}"
        again = "" if begin.is_first else " again"
        names = ", ".join(model.card.model_id for model in head.served)
        names = names or "the models of vLLM servers"
        log.info("serving %s%s at %s (Ctrl-C ends it)", names, again, url)


def _tls(config: Config) -> TlsFiles | None:
    api = config.api
    try:
        files = api.ssl_certfile, api.ssl_keyfile, api.ssl_ca_certs
        return TlsFiles(*files) if api.ssl_certfile else None
    except TlsError as error:
        raise ClusterError(str(error)) from None


def _peer_tls(config: Config) -> PeerTls | None:
    own = config.tls
    try:
        return PeerTls(own.certfile, own.keyfile, own.ca_certs) if own.certfile else None
    except PeerTlsError as error:
        raise ClusterError(str(error)) from None


def _note_failure(broken: list[str], stop: asyncio.Event, task: asyncio.Task[None]) -> None:
    """Ends a head that has lost its ticker or its HTTP server, so that it can be restarted."""
    if task.cancelled() or task.exception() is None:
        return
    error = task.exception()
    log.error("the head failed", exc_info=error)
    broken.append(f"the head failed: {type(error).__name__}: {error}; see the log above")
    stop.set()


async def _wait_for_workers(head: Head, count: int, stop: asyncio.Event) -> None:
    """Waits until all workers have joined. Raises ClusterError if one fails or time runs out."""
    joined = asyncio.create_task(head.wait_for_instances(count))
    failed = asyncio.create_task(head.start_failures.get())
    stopped = asyncio.create_task(stop.wait())
    tasks = {joined, failed, stopped}
    try:
        done, _ = await asyncio.wait(tasks, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
    if failed in done:
        raise ClusterError(failed.result())
    if not done:
        raise ClusterError(f"the workers did not start within {START_S:.0f} s; see the log above")


def resolved(config: Config) -> Config:
    """Resolves device and dtype, so that all instances agree on them.

    Raises ClusterError if other settings do not fit the device that was found.
    """
    if config.engine.kind == "vllm":  # its servers choose both
        device, dtype = "cpu", "float32"
    else:
        from moonpool.engine.device import resolve_device, resolve_dtype  # needs torch

        device = resolve_device(config.engine.device)
        dtype = resolve_dtype(config.model.dtype, device)
    engine = msgspec.structs.replace(config.engine, device=device)
    model = msgspec.structs.replace(config.model, dtype=dtype)
    settled = msgspec.structs.replace(config, model=model, engine=engine)
    try:
        check_values(settled)
    except ConfigError as error:
        raise ClusterError(str(error)) from None
    return settled


def _make_head(config: Config, secret: bytes, keys: ApiKeys = NO_KEYS) -> Head:
    """Raises ClusterError."""
    is_vllm = config.engine.kind == "vllm"
    loaded = None if is_vllm else load_model(config)
    try:
        head = Head(
            config, loaded, secret, tenant_shares=keys.shares, tenant_caches=keys.cache_shares
        )
        if is_vllm and config.model.name:
            head.served.expect_named(config.model.name)
    except ConfigError as error:
        raise ClusterError(str(error)) from None
    return head


def _api_options(config: Config, keys: ApiKeys) -> ApiOptions:
    return ApiOptions(
        api_keys=keys.tenants,
        admins=keys.admins,
        limits=keys.limits,
        max_body_bytes=config.api.max_body_bytes,
        allowed_origins=config.api.allowed_origins,
        exports_traces=bool(config.telemetry.otlp_traces_endpoint),
        reads_reasoning=config.api.reasoning_parser == "auto",
    )


def _shares(config: Config) -> list[CoreShare]:
    """Returns the cores of each worker, or an empty list if workers are not pinned."""
    engine = config.engine
    if engine.pinning == "off" or engine.device != "cpu" or engine.kind == "vllm":
        return []
    if config.cluster.attention:
        return []
    threads = threads_per_process(config)
    degrees = [config.engine.degree(role) for role in config.cluster.roles]
    wanted = [threads * degree.num_processes for degree in degrees]
    shares = share_cores(read_cores(), wanted, usable_cores())
    if shares:
        log.info("engines on cores %s", ", ".join(format_cores(s.engine) for s in shares))
    return shares
