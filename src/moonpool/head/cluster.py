"""Runs one head from start to end: the Conductor's driver and the HTTP server."""

from __future__ import annotations

import asyncio
import logging

from moonpool.api.app import make_app
from moonpool.api.body_reading.client import ForkedReader
from moonpool.api.keys import ApiKeys
from moonpool.api.models.model_apis import ModelApis
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
from moonpool.head.fronts.front_link import FrontCalls
from moonpool.head.head import ClusterHead
from moonpool.head.head_drain import drain
from moonpool.head.launcher import local_instances
from moonpool.head.models.model_loading import ApiModel, load_model, load_offered, named_offer
from moonpool.head.serving import Calls, OwnCalls, Start, serve_calls, start_serving
from moonpool.head.supervisor_link import Inheritance, SupervisorLink

log = logging.getLogger("moonpool")

START_S = 300.0


async def serve_cluster(link: SupervisorLink, forked: ForkedReader | None = None) -> None:
    """Serves as the head of one cluster until the supervisor ends it. `forked`: a forked process
    that reads bodies. Raises ClusterError."""
    start = await start_serving(link)
    config, begin = start.config, start.inherited.begin
    loaded = await _load(config, begin.is_first, forked)
    head = _make_head(config, loaded, begin.secret, start.keys)
    head.on_silent, head.on_instances = link.kill, link.know
    link.on_crash = head.note_crash
    head.succession, head.num_restarts = link, begin.num_restarts
    head.num_upgrades, head.standbys.epoch = begin.num_upgrades, begin.epoch
    if begin.launch:
        head.note_launched(name for _, name in local_instances(config.cluster))
    await head.expect(begin.expected, begin.offers)
    await head.start(start.inherited.control, start.peer_tls)
    calls = _calls_of(link, head, start)
    beat = asyncio.create_task(link.beat())
    await _begin(link, head, config, start.inherited)
    await serve_calls(link, calls, head, (head.ticker, beat), config.api.drain_seconds)
    log.info("stopping")
    await drain(head, config.api.drain_seconds)
    link.ending()
    await calls.end()
    await head.stop()
    beat.cancel()


def _calls_of(link: SupervisorLink, head: ClusterHead, start: Start) -> Calls:
    if start.config.api.fronts > 1:
        return FrontCalls(link, head, start.options)
    models = ModelApis(head, start.options)
    head.work.mark = link.mark
    app = make_app(head, start.options, models)
    return OwnCalls(link, start, app, models, head.standbys.answers)


async def _begin(
    link: SupervisorLink, head: ClusterHead, config: Config, inherited: Inheritance
) -> None:
    """Waits for the workers of the first head, and logs where the cluster is. A later head serves
    at once: its requests wait for the workers."""
    begin = inherited.begin
    shares = core_shares(config) if begin.launch else []
    link.prepared(shares, threads_per_process(config))
    if begin.launch:
        pin_thread(shares[0].others if shares else ())
    settle_memory()  # runs while the first worker starts, which takes longer
    if begin.is_first and begin.launch:
        await _wait_for_workers(head, config.cluster.num_instances, link.stop)
    if begin.is_first and not begin.launch:
        log.info("waiting for workers at %s:%d", *inherited.control.getsockname()[:2])
    if not link.stop.is_set():
        host = f"[{config.api.host}]" if ":" in config.api.host else config.api.host
        scheme = "https" if config.api.ssl_certfile else "http"
        url = f"{scheme}://{host}:{inherited.http.getsockname()[1]}"
        again = "" if begin.is_first else " again"
        names = ", ".join(model.card.model_id for model in head.served)
        names = names or "the models of vLLM servers"
        log.info("serving %s%s at %s (Ctrl-C ends it)", names, again, url)


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


async def _load(config: Config, is_new: bool, forked: ForkedReader | None) -> ApiModel | None:
    """Loads the model that the configuration names. Returns None if vLLM servers bring their own.
    Raises ClusterError."""
    if config.engine.kind != "vllm":
        return await load_model(config, is_new, forked)
    if forked is not None:
        forked.close()
    name = config.model.name
    return await load_offered(config, named_offer(name), True, is_new) if name else None


def _make_head(
    config: Config, loaded: ApiModel | None, secret: bytes, keys: ApiKeys
) -> ClusterHead:
    """Raises ClusterError."""
    try:
        return ClusterHead(
            config, loaded, secret, tenant_shares=keys.shares, tenant_caches=keys.cache_shares
        )
    except ConfigError as error:
        raise ClusterError(str(error)) from None


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
