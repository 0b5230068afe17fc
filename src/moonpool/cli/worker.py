"""`moonpool worker`: one instance in one process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncGenerator, Coroutine
from typing import TYPE_CHECKING, Any

import click
import uvloop
from setproctitle import getproctitle, setproctitle

from moonpool.children.parent import end_with
from moonpool.cli.help_screen import ScreenHelp
from moonpool.cli.logs import choose_logging, log_options, set_up_logging
from moonpool.cli.output import fail
from moonpool.cli.peer_tls import peer_tls, tls_options
from moonpool.config.rules import vllm_place
from moonpool.config.tables import (
    ConfigError,
    LogFormat,
    LogLevel,
    TelemetryConfig,
    VllmAddress,
)
from moonpool.gc_tuning import settle_threads
from moonpool.plugins.engines import own_engine
from moonpool.plugins.workers import (
    DrainableWorker,
    RunnableWorker,
    WorkerKind,
    WorkerSettings,
    worker_maker,
)
from moonpool.protocol.supervision import HUNG_STATUS
from moonpool.types import InstanceId, Role

if TYPE_CHECKING:
    from moonpool.cores import CoreShare

SECRET_VARIABLE = "MOONPOOL_CLUSTER_SECRET"  # noqa: S105 - its name, not its value
API_KEY_VARIABLE = "VLLM_API_KEY"
ATTENTION = "attention"
GRACE_S = 2.0
"""Seconds after the end of a drain in which the head may still confirm it."""


def cluster_secret() -> bytes:
    """Returns the secret from the environment; ends the command if there is none.

    A command line would be visible to every user of the machine.
    """
    text = os.environ.get(SECRET_VARIABLE, "")
    try:
        secret = bytes.fromhex(text)
    except ValueError:
        fail(f"{SECRET_VARIABLE} must be hexadecimal digits")
    if len(secret) < 16:
        fail(
            f"set {SECRET_VARIABLE} to at least 32 hexadecimal digits, the same for head and"
            " workers (for example: openssl rand -hex 32)"
        )
    return secret


@click.command(
    cls=ScreenHelp,
    screen=(
        "--role",
        "--head",
        "--name",
        "--host",
        "--vllm",
        "--pipeline-parallel-size",
        "--tensor-parallel-size",
        "--cores",
        "--other-cores",
        "--drain-seconds",
        "--health",
        "--log-level",
    ),
)
@click.option(
    "--role",
    type=click.Choice([*(r.value for r in Role), ATTENTION]),
    required=True,
    help="Role of the instance.",
)
@click.option(
    "--head", "head_address", required=True, metavar="HOST:PORT", help="Address of the head."
)
@click.option("--name", help="Name of the instance; role and a random suffix unless given.")
@click.option(
    "--host", help="Address at which peers connect; the one that faces the head unless given."
)
@click.option(
    "--pipeline-parallel-size",
    "num_stages",
    type=click.IntRange(1, 64),
    help="Pipeline stages, each with a share of the layers; from the head unless given.",
)
@click.option(
    "--tensor-parallel-size",
    "num_ranks",
    type=click.IntRange(1, 16),
    help="Tensor-parallel ranks, each with a share of every layer; from the head unless given.",
)
@click.option(
    "--drain-seconds",
    type=click.FloatRange(min=0, max=3600),
    default=25.0,
    show_default=True,
    help="After SIGTERM, finish requests and hand over blocks for this long; 0 ends at once.",
)
@click.option(
    "--vllm",
    "place",
    metavar="URL[,EVENTS[,REPLAY]]",
    help="Let this vLLM server compute; EVENTS publishes its KV events, REPLAY repeats them. Its"
    " API key is VLLM_API_KEY in the environment.",
)
@click.option(
    "--health",
    metavar="HOST:PORT",
    help="Answer the probes of an orchestrator here: /live, and /ready while the instance is"
    " joined.",
)
@click.option(
    "--cores", default="", help="Cores of the engine's threads, such as 0-3; any unless given."
)
@click.option("--other-cores", default="", help="Cores of all other threads; any unless given.")
@tls_options
@click.option("--kept-memory", "kept", nargs=2, hidden=True)
@click.option("--parts", "num_parts", type=int, default=0, hidden=True)
@log_options
@click.option(
    "--exit-with-parent", is_flag=True, help="End when the process that started this one ends."
)
@click.pass_obj
def worker(
    shared: object | None,
    role: str,
    head_address: str,
    name: str | None,
    host: str | None,
    num_stages: int | None,
    num_ranks: int | None,
    drain_seconds: float,
    place: str | None,
    health: str | None,
    cores: str,
    other_cores: str,
    certfile: str,
    keyfile: str,
    ca_certs: str,
    kept: tuple[str, str] | None,
    num_parts: int,
    log_level: LogLevel,
    log_format: LogFormat,
    exit_with_parent: bool,
) -> None:
    """Start one instance, which takes model and settings from the head it joins.

    Head and workers share a secret: set MOONPOOL_CLUSTER_SECRET to the same for all.
    """
    head_host, port = head_place(head_address, "--head")
    name = name or f"{role}-{secrets.token_hex(3)}"
    if num_parts:
        _fork_parts(num_parts, name)
    choose_logging(TelemetryConfig(log_level=log_level, log_format=log_format))
    set_up_logging(name)
    settle_threads()
    secret = cluster_secret()
    if exit_with_parent:
        end_with(os.getppid())
    tls = peer_tls(certfile, keyfile, ca_certs)
    share = _core_share(cores, other_cores)
    vllm = None if place is None else _vllm_address(place, role)

    is_attention = role == ATTENTION
    kind: WorkerKind = "vllm" if vllm else "attention" if is_attention else "moonpool"
    settings = WorkerSettings(
        name=InstanceId(name),
        role=None if is_attention else Role(role),
        machine=socket.gethostname(),
        host=host,
        secret=secret,
        tls=tls,
        share=share,
        num_stages=num_stages,
        num_ranks=num_ranks,
        kept=kept,
        shared=shared,
        vllm=vllm,
        vllm_key=os.environ.get(API_KEY_VARIABLE, "") if vllm else "",
    )
    make = worker_maker(kind)

    probed = None if health is None else head_place(health, "--health")

    async def run() -> None:
        running = make(settings)
        _end_in_order(running, drain_seconds)
        async with _answering_probes(running, probed):
            await running.run(head_host, port)

    _run(run(), exit_with_parent)


@contextlib.asynccontextmanager
async def _answering_probes(
    running: RunnableWorker, probed: tuple[str, int] | None
) -> AsyncGenerator[None]:
    """Raises WorkerError if the address cannot be had."""
    if probed is None:
        yield
        return
    from moonpool.link.head_link import WorkerError
    from moonpool.link.health import HealthServer

    server = HealthServer(running.not_ready)
    try:
        await server.start(*probed)
    except OSError as error:
        host, port = probed
        raise WorkerError(f"cannot answer probes at {host}:{port} (--health): {error}") from None
    try:
        yield
    finally:
        server.close()


def _run(work: Coroutine[Any, Any, None], is_launched: bool) -> None:
    """Runs a worker to its end, and says why it ended, unless the head of the same server has."""
    from moonpool.link.head_link import HungError, ToldError, WorkerError

    try:
        uvloop.run(work)
    except HungError as error:
        sys.stderr.write(f"moonpool: {error}\n")
        sys.stderr.flush()
        os._exit(HUNG_STATUS)  # an orderly exit would wait for the hanging thread
    except WorkerError as error:
        if is_launched and isinstance(error, ToldError):
            raise SystemExit(1) from None
        fail(str(error))
    except asyncio.CancelledError:
        raise SystemExit(0) from None


def _fork_parts(count: int, name: str) -> None:
    """Prepares processes for the stages or ranks of this instance, before it has threads."""
    from moonpool.cli.head_process import run_line

    title = getproctitle()
    setproctitle(f"moonpool part of {name}")
    own_engine().fork_parts(count, end_with, run_line)
    setproctitle(title)


def head_place(text: str, option: str) -> tuple[str, int]:
    """Returns host and port from HOST:PORT. Ends the command if `text` has another form."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        fail(f"{option} must be HOST:PORT, not {text!r}")
    return host.strip("[]"), int(port)


def _end_in_order(running: RunnableWorker, drain_seconds: float) -> None:
    """Sets what signals do to the current task.

    The first SIGTERM drains the instance, if it can be drained; a second one ends it at once.
    """
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def leave() -> None:
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
        drainable = running if isinstance(running, DrainableWorker) else None
        if drainable is not None and drain_seconds and drainable.ask_to_leave(drain_seconds):
            loop.call_later(drain_seconds + GRACE_S, task.cancel)
        else:
            task.cancel()

    loop.add_signal_handler(signal.SIGINT, task.cancel)
    loop.add_signal_handler(signal.SIGTERM, leave)


def _vllm_address(text: str, role: str) -> VllmAddress:
    if role == ATTENTION:
        fail(
            "--vllm cannot be combined with --role attention: a vLLM server computes whole requests"
        )
    try:
        return vllm_place(text)
    except ConfigError as error:
        fail(f"--vllm: {error}")


def _core_share(cores: str, other_cores: str) -> CoreShare:
    """Parses the cores, and pins this process's present threads to the other cores."""
    from moonpool.cores import CoreShare, parse_cores, pin_thread

    try:
        share = CoreShare(parse_cores(cores), parse_cores(other_cores))
    except ValueError:
        fail("--cores and --other-cores must be lists such as 0-3,8")
    pin_thread(share.others)
    return share
