"""One cluster from start to end: head, HTTP server and, if asked, local workers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

import msgspec

from moonpool.api.app import make_app
from moonpool.api.frontend import ModelCard
from moonpool.api.options import ApiOptions
from moonpool.api.server import PortError, http_server, listen
from moonpool.config import Config, ConfigError, check_values
from moonpool.engine.cuda.choice import resolve_device
from moonpool.engine.dtype import resolve_dtype
from moonpool.engine.outline import outline_of, outline_without_weights
from moonpool.engine.spec import ModelError
from moonpool.engine.tokenizer import TokenizerError
from moonpool.engine.tokenizers.registry import open_tokenizer
from moonpool.runtime.cores import (
    CoreShare,
    format_cores,
    pin_thread,
    read_cores,
    share_cores,
    threads_per_process,
    usable_cores,
)
from moonpool.runtime.head import Head
from moonpool.runtime.launcher import LocalLauncher
from moonpool.runtime.nursery import Nursery
from moonpool.runtime.settle import settle_memory

log = logging.getLogger("moonpool")

START_S = 300.0
UNKNOWN_TOKENS = 1 << 30
"""The context of a model whose files do not say; what its instances have room for limits it."""


class ClusterError(Exception):
    """The cluster cannot start or go on; one line says why and what to do."""


async def run_cluster(
    config: Config,
    secret: bytes,
    launch: bool,
    install_signals: Callable[[asyncio.Event], None],
    nursery: Nursery | None = None,
) -> None:
    """Serves until a signal sets the stop event. Raises ClusterError."""
    stop = asyncio.Event()
    install_signals(stop)
    async with running_cluster(config, secret, launch, stop, nursery) as url:
        if not stop.is_set():
            log.info("serving %s at %s (Ctrl-C ends it)", config.model.name, url)
            await stop.wait()
        log.info("ending")


@asynccontextmanager
async def running_cluster(
    config: Config, secret: bytes, launch: bool, stop: asyncio.Event, nursery: Nursery | None
) -> AsyncIterator[str]:
    """Yields the API's URL once all instances are up (or `stop` was set before)."""
    config = resolved(config)
    try:
        sock = listen(config.api.host, config.api.port)
    except PortError as error:
        raise ClusterError(str(error)) from None
    head = _make_head(config, secret)
    try:
        head_port = await head.start()
    except OSError as error:
        sock.close()
        network = config.network
        text = f"cannot listen for workers at {network.head_host}:{network.head_port}: {error}"
        raise ClusterError(text) from None
    server = http_server(make_app(head, _api_options(config)))
    unpinned = [core.number for core in read_cores()]
    serving: asyncio.Task[None] | None = None
    launcher: LocalLauncher | None = None
    try:
        if launch:
            shares = _shares(config)
            threads = threads_per_process(config)
            launcher = LocalLauncher(
                config.cluster, head_port, secret, threads, shares, nursery, config.vllm
            )
            head.on_silent = launcher.kill
            launcher.start()
            pin_thread(shares[0].others if shares else ())
            await _wait_for_workers(head, launcher, stop)
        else:
            log.info("workers join at %s:%d", config.network.head_host, head_port)
        settle_memory()
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        broken: list[str] = []
        for task in (serving, head.ticker):
            task.add_done_callback(partial(_note_failure, broken, stop))
        host = f"[{config.api.host}]" if ":" in config.api.host else config.api.host
        yield f"http://{host}:{sock.getsockname()[1]}"
        if broken:
            raise ClusterError(broken[0])
    finally:
        server.should_exit = True
        if serving is not None:
            await asyncio.wait([serving])
        await head.stop()
        if launcher is not None:
            await launcher.stop()
        pin_thread(unpinned)
        sock.close()


def _note_failure(broken: list[str], stop: asyncio.Event, task: asyncio.Task[None]) -> None:
    """A head without its clock or its HTTP server must end, not linger: someone restarts it
    then."""
    if task.cancelled() or task.exception() is None:
        return
    error = task.exception()
    log.error("the head cannot go on", exc_info=error)
    broken.append(f"the head failed: {type(error).__name__}: {error}; see the log above")
    stop.set()


async def _wait_for_workers(head: Head, launcher: LocalLauncher, stop: asyncio.Event) -> None:
    """Until all joined, one failed, or the person lost patience."""
    joined = asyncio.create_task(head.wait_for_instances(launcher.num_instances))
    failed = asyncio.create_task(head.start_failures.get())
    stopped = asyncio.create_task(stop.wait())
    tasks = {joined, failed, stopped}
    try:
        done, _ = await asyncio.wait(
            {*tasks, *launcher.keepers}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED
        )
    finally:
        for task in tasks:
            task.cancel()
    if failed in done:
        raise ClusterError(failed.result())
    for keeper in launcher.keepers:
        if keeper.done() and not (joined in done or stopped in done):
            error = keeper.exception()
            text = f"cannot start a worker: {error}" if error else "a worker does not stay up"
            raise ClusterError(f"{text}; see the log above")
    if not done:
        raise ClusterError(f"the workers did not come up within {START_S:.0f} s; see the log above")


def resolved(config: Config) -> Config:
    """Device and dtype are settled here, so that all instances agree on them. Raises
    ClusterError where the rest does not go with the device that was found."""
    device = resolve_device(config.engine.device)
    engine = msgspec.structs.replace(config.engine, device=device)
    dtype = resolve_dtype(config.model.dtype, device)
    model = msgspec.structs.replace(config.model, dtype=dtype)
    settled = msgspec.structs.replace(config, model=model, engine=engine)
    try:
        check_values(settled)
    except ConfigError as error:
        raise ClusterError(str(error)) from None
    return settled


def _make_head(config: Config, secret: bytes) -> Head:
    try:
        read = outline_without_weights if config.engine.kind == "vllm" else outline_of
        model = read(config.model.name, config.model.dtype)
        tokenizer = open_tokenizer(model.tokenizer, model.vocab_size)
    except (ModelError, TokenizerError) as error:
        raise ClusterError(str(error)) from None
    for note in model.notes:
        log.info("%s", note)
    longest = model.max_positions
    wanted = config.model.max_model_tokens
    if longest and wanted > longest:
        raise ClusterError(
            f"max_model_len {wanted} exceeds the {longest} tokens that {config.model.name} supports"
        )
    card = ModelCard(
        model_id=config.model.served_name or config.model.name,
        created_s=int(time.time()),
        max_model_tokens=wanted or longest or UNKNOWN_TOKENS,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        sampling=dict(model.sampling),
    )
    return Head(config, card, tokenizer, secret)


def _api_options(config: Config) -> ApiOptions:
    keys = config.api.api_keys
    return ApiOptions(
        api_keys={key: f"key{i}" for i, key in enumerate(keys)},
        served_names=(config.model.served_name,) if config.model.served_name else (),
        max_body_bytes=config.api.max_body_bytes,
    )


def _shares(config: Config) -> list[CoreShare]:
    """Of this machine's cores, for every worker; none where they are not to be pinned."""
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
