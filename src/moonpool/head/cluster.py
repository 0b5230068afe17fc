"""Runs one head from start to end: the Conductor's driver and the HTTP server."""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial

import msgspec

from moonpool.api.access.protection import UNPROTECTED, open_keys, open_peer_tls, open_tls
from moonpool.api.keys import NO_KEYS, ApiKeys
from moonpool.api.output_text.formats import UnknownParserError, check_parsers
from moonpool.api.serving_backend import ApiOptions
from moonpool.config.rules import check_values
from moonpool.config.tables import Config, ConfigError
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
from moonpool.head.cluster_error import ClusterError
from moonpool.head.fronts.front_calls import FrontCalls
from moonpool.head.head import ClusterHead
from moonpool.head.head_drain import drain
from moonpool.head.launcher import local_instances
from moonpool.head.models.model_loading import ApiModel, load_model, load_offered, named_offer
from moonpool.head.own_calls import OwnCalls
from moonpool.head.supervisor_link import Inheritance, SupervisorLink
from moonpool.plugins.engines import EngineError, own_engine

log = logging.getLogger("moonpool")

START_S = 300.0


async def serve_cluster(link: SupervisorLink) -> None:
    """Serves as the head of one cluster until the supervisor ends it. Raises ClusterError."""
    inherited = await link.inherit()
    begin = inherited.begin
    config = resolved(begin.config, computes_here=begin.launch)
    try:
        tls, peer_tls, keys = open_tls(config), open_peer_tls(config), open_keys(config)
    except UNPROTECTED as error:
        raise ClusterError(str(error)) from None
    options = api_options(config, keys)
    loaded = await _load(config, begin.is_first)
    head = _make_head(config, loaded, begin.secret, keys)
    head.on_silent, head.on_instances = link.kill, link.know
    link.on_crash = head.note_crash
    head.succession, head.num_restarts = link, begin.num_restarts
    head.num_upgrades, head.standbys.epoch = begin.num_upgrades, begin.epoch
    if begin.launch:
        head.note_launched(name for _, name in local_instances(config.cluster))
    await head.expect(begin.expected, begin.offers)
    await head.start(inherited.control, peer_tls)
    calls: OwnCalls | FrontCalls
    if config.api.fronts > 1:
        calls = FrontCalls(link, head, options)
    else:
        calls = OwnCalls(link, head, options, inherited, tls)
    beat = asyncio.create_task(link.beat())
    await _begin(link, head, config, inherited)
    broken: list[str] = []
    serving = await calls.begin()
    for task in (serving, head.ticker, beat):
        task.add_done_callback(partial(note_failure, broken, link.stop))
    if not link.stop.is_set():
        link.up()
        await link.stop.wait()
    if broken:  # the next head goes on with the workers and the answers
        raise ClusterError(broken[0])
    if link.hands_over:
        head.end_views()
        await calls.hand_over(config.api.drain_seconds)
        await link.flush()
        os._exit(0)  # at once: an orderly end would end the answers, which go on
    log.info("stopping")
    await drain(head, config.api.drain_seconds)
    link.ending()
    await calls.end()
    await head.stop()
    beat.cancel()


async def _begin(
    link: SupervisorLink, head: ClusterHead, config: Config, inherited: Inheritance
) -> None:
    """Waits for the workers of the first head, and says where the cluster is. A further head serves
    at once: its requests wait for the workers."""
    begin = inherited.begin
    shares = core_shares(config) if begin.launch else []
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


def note_failure(broken: list[str], stop: asyncio.Event, task: asyncio.Task[None]) -> None:
    """Ends a head that has lost its ticker or its HTTP server, so that it can be restarted."""
    if task.cancelled() or task.exception() is None:
        return
    error = task.exception()
    log.error("the head failed", exc_info=error)
    broken.append(f"the head failed: {type(error).__name__}: {error}; see the log above")
    stop.set()


async def _wait_for_workers(head: ClusterHead, count: int, stop: asyncio.Event) -> None:
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


def resolved(config: Config, computes_here: bool = False) -> Config:
    """Resolves device and dtype, so that all instances agree on them.

    Raises ClusterError if other settings do not fit the device that was found, or if the engines
    are on this machine, and it lacks the device.
    """
    if config.engine.kind == "vllm":  # its servers choose both
        device, dtype = "cpu", "float32"
    else:
        try:
            device, dtype = own_engine().device_and_dtype(config, computes_here)
        except EngineError as error:
            raise ClusterError(str(error)) from None
    engine = msgspec.structs.replace(config.engine, device=device)
    model = msgspec.structs.replace(config.model, dtype=dtype)
    settled = msgspec.structs.replace(config, model=model, engine=engine)
    try:
        check_values(settled)
    except ConfigError as error:
        raise ClusterError(str(error)) from None
    return settled


async def _load(config: Config, is_new: bool) -> ApiModel | None:
    """Loads the model that the configuration names; None: vLLM servers bring theirs. Raises
    ClusterError."""
    if config.engine.kind != "vllm":
        return await load_model(config, is_new)
    name = config.model.name
    return await load_offered(config, named_offer(name), True, is_new) if name else None


def _make_head(
    config: Config, loaded: ApiModel | None, secret: bytes, keys: ApiKeys = NO_KEYS
) -> ClusterHead:
    """Raises ClusterError."""
    try:
        return ClusterHead(
            config, loaded, secret, tenant_shares=keys.shares, tenant_caches=keys.cache_shares
        )
    except ConfigError as error:
        raise ClusterError(str(error)) from None


def api_options(config: Config, keys: ApiKeys) -> ApiOptions:
    """Raises ClusterError."""
    try:
        check_parsers(config.api.tool_call_parser, config.api.reasoning_parser)
    except UnknownParserError as error:
        raise ClusterError(str(error)) from None
    return ApiOptions(
        api_keys=keys.tenants,
        operators=keys.operators,
        limits=keys.limits,
        max_body_bytes=config.api.max_body_bytes,
        allowed_origins=config.api.allowed_origins,
        allowed_hosts=config.api.allowed_hosts,
        keepalive_s=config.api.keepalive_s,
        strict_max_tokens=config.api.strict_max_tokens,
        exports_traces=bool(config.telemetry.otlp_traces_endpoint),
        tool_call_parser=config.api.tool_call_parser,
        reasoning_parser=config.api.reasoning_parser,
    )


def core_shares(config: Config) -> list[CoreShare]:
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
