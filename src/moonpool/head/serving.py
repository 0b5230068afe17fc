"""The common life cycle of a head and a front, from the start by the supervisor to the end."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec
from starlette.applications import Starlette

from moonpool.api.access.protection import UNPROTECTED, open_keys, open_peer_tls, open_tls
from moonpool.api.app import http_server
from moonpool.api.connection.kept_answers import KeptAnswers
from moonpool.api.connection.tls import TlsFiles
from moonpool.api.keys import ApiKeys
from moonpool.api.models.model_apis import ModelApis
from moonpool.api.output_text.formats import UnknownParserError, check_parsers
from moonpool.api.serving_backend import ApiOptions
from moonpool.config.rules import check_values
from moonpool.config.tables import Config, ConfigError
from moonpool.head.cluster_error import ClusterError
from moonpool.head.supervisor_link import Inheritance, SupervisorLink
from moonpool.link.tls import PeerTls
from moonpool.plugins.engines import EngineError, own_engine

log = logging.getLogger("moonpool")


@dataclass(frozen=True, slots=True)
class Start:
    """The state that the supervisor gives a process, and the values that follow from its
    configuration."""

    inherited: Inheritance
    config: Config
    tls: TlsFiles | None
    peer_tls: PeerTls | None
    keys: ApiKeys
    options: ApiOptions


async def start_serving(link: SupervisorLink) -> Start:
    """Raises ClusterError."""
    inherited = await link.inherit()
    config = resolved(inherited.begin.config, computes_here=inherited.begin.launch)
    try:
        tls, peer_tls, keys = open_tls(config), open_peer_tls(config), open_keys(config)
    except UNPROTECTED as error:
        raise ClusterError(str(error)) from None
    return Start(inherited, config, tls, peer_tls, keys, _api_options(config, keys))


class Calls(Protocol):
    """The part that answers calls, from `begin` until `hand_over` or `end`."""

    async def begin(self) -> asyncio.Task[None]:
        """Starts to answer calls, and returns the task that runs."""

    async def hand_over(self, calls_s: float) -> None:
        """Hands over to the next process. A call without an answer may take `calls_s`."""

    async def end(self) -> None: ...


class OwnCalls:
    """Answers calls with the HTTP server of this process."""

    def __init__(
        self,
        link: SupervisorLink,
        start: Start,
        app: Starlette,
        models: ModelApis,
        answers: KeptAnswers,
        shares_port: bool = False,
    ) -> None:
        """`models` is closed at the end. `shares_port`: whether other processes accept on the same
        socket."""
        self._link = link
        self._inherited = start.inherited
        self._models = models
        answers.enders = link.enders
        for kept in start.inherited.cut_answers:
            answers.adopt(kept)
        self._server = http_server(
            app,
            tls=start.tls,
            keeper=link,
            answers=answers,
            mark=link.mark,
            shares_port=shares_port,
        )

    async def begin(self) -> asyncio.Task[None]:
        """Continues the answers of an earlier process, and accepts calls. Returns the task that
        serves."""
        for received, sock in self._inherited.answers:
            await self._server.resume(sock, received)
        for sock in self._inherited.connections:
            await self._server.adopt(sock)
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._inherited.http]))
        return self._serving

    async def hand_over(self, calls_s: float) -> None:
        """Hands over to the next process."""
        await self._server.hand_over(self._link.pass_on, calls_s)
        self._models.close()

    async def end(self) -> None:
        self._server.should_exit = True
        await asyncio.wait([self._serving])
        self._models.close()


class Viewed(Protocol):
    """A head as its watchers (metrics, live page) see it."""

    def end_views(self) -> None: ...


async def serve_calls(
    link: SupervisorLink,
    calls: Calls,
    viewed: Viewed,
    own: Iterable[asyncio.Task[None]],
    drain_s: float,
) -> None:
    """Serves until the supervisor ends this process. Returns if the process should end in order; if
    the next process takes over the answers, this call ends the process. `own`: other tasks that
    must run at the same time.

    Raises ClusterError if something breaks, so that the next process goes on.
    """
    broken: list[str] = []
    for task in (await calls.begin(), *own):
        task.add_done_callback(partial(_note_failure, broken, link.stop))
    if not link.stop.is_set():
        link.up()
        await link.stop.wait()
    if broken:
        raise ClusterError(broken[0])
    if link.hands_over:
        viewed.end_views()
        await calls.hand_over(drain_s)
        await link.flush()
        # exits immediately: an orderly exit would end the answers, which continue elsewhere
        os._exit(0)


def _note_failure(broken: list[str], stop: asyncio.Event, task: asyncio.Task[None]) -> None:
    """Ends a head that has lost its ticker or its HTTP server, so that it can be restarted."""
    if task.cancelled() or task.exception() is None:
        return
    error = task.exception()
    log.error("the head failed", exc_info=error)
    broken.append(f"the head failed: {type(error).__name__}: {error}; see the log above")
    stop.set()


def resolved(config: Config, computes_here: bool = False) -> Config:
    """Resolves device and dtype, so that all instances agree on them.

    Raises ClusterError if other settings do not fit the device that was found, or if the engines
    run on this machine and it lacks the device.
    """
    if config.engine.kind == "vllm":  # vLLM servers choose device and dtype
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


def _api_options(config: Config, keys: ApiKeys) -> ApiOptions:
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
