"""The processes that the supervisor starts besides workers: a head, and a fork server that replaces
one that has ended."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

import click
import uvloop
from setproctitle import setproctitle

from moonpool.children.parent import end_with
from moonpool.cli.logs import set_up_logging
from moonpool.plugins.engines import own_engine
from moonpool.plugins.workers import WorkerKind, worker_maker

if TYPE_CHECKING:
    from moonpool.head.supervisor_link import SupervisorLink

log = logging.getLogger("moonpool")


@click.command(hidden=True)
@click.option("--fd", type=int, required=True, help="Socket of the supervisor.")
@click.option("--engine", is_flag=True, help="Import the engine before the message HeadLoaded.")
def head_process(fd: int, engine: bool) -> None:
    """Serve as a supervisor's head."""
    few_threads()
    from moonpool.api.body_reading.client import fork_reader
    from moonpool.head.cluster import serve_cluster

    reader = fork_reader()
    _serve(fd, "head", partial(serve_cluster, forked=reader), own_engine if engine else None)


@click.command(hidden=True)
@click.option("--fd", type=int, required=True, help="Socket of the supervisor.")
def front_process(fd: int) -> None:
    """Serve as a front of a supervisor's head."""
    from moonpool.head.fronts.front_process import serve_front

    _serve(fd, "front", serve_front)


def _serve(
    fd: int,
    name: str,
    serve: Callable[[SupervisorLink], Awaitable[None]],
    prepare: Callable[[], object] | None = None,
) -> None:
    end_with(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the supervisor handles Ctrl-C
    set_up_logging(name)
    from moonpool.head.cluster_error import ClusterError
    from moonpool.head.supervisor_link import SupervisorLink

    if prepare is not None:
        prepare()

    async def run() -> None:
        link = SupervisorLink(socket.socket(fileno=fd))
        link.loaded()
        try:
            await serve(link)
        except ClusterError as error:
            link.failed(str(error))
            os._exit(1)
        except Exception:
            log.exception("the %s failed", name)
            # exits immediately, because an orderly exit would end the answers, which can continue
            os._exit(1)
        link.close()

    uvloop.run(run())


def import_for(engine: str) -> None:
    """Imports what head and workers need."""
    import_workers(engine)
    import_head()


def import_workers(engine: str) -> None:
    """Imports what workers need, with the threads of a worker: torch reads them once."""
    few_threads()
    kinds: tuple[WorkerKind, ...] = ("vllm",) if engine == "vllm" else ("moonpool", "attention")
    for kind in kinds:
        worker_maker(kind)
    if engine != "vllm":
        own_engine()


def few_threads() -> None:
    """Keeps numpy from starting threads that nothing uses. Must be called before numpy is
    imported."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


def import_head() -> None:
    """Imports what heads and fronts need in addition."""
    import moonpool.head.cluster
    import moonpool.head.fronts.front_process  # noqa: F401


def run_line(line: list[str], shared: object | None = None) -> None:
    """Runs a command line in a process that was forked for it, and has `shared` weights."""
    from moonpool.cli.main import cli

    setproctitle(" ".join([sys.executable, "-m", "moonpool", *line]))
    cli(args=line, prog_name="moonpool", obj=shared)


@click.command(hidden=True)
@click.option("--fd", type=int, required=True, help="Socket of the supervisor.")
@click.option(
    "--engine", type=click.Choice(["own", "vllm"]), required=True, help="Engine of workers."
)
def fork_server(fd: int, engine: str) -> None:
    """Fork a supervisor's head and workers."""
    from moonpool.head.fork_server import serve_renewed

    run_line(serve_renewed(socket.socket(fileno=fd), lambda: import_for(engine)))
