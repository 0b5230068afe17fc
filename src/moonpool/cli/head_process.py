"""The process of a head, which the supervisor starts."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket

import click
import uvloop

from moonpool.cli.logs import set_up_logging
from moonpool.transfer.parent import end_with

log = logging.getLogger("moonpool")


@click.command(hidden=True)
@click.option("--fd", type=int, required=True, help="Socket of the supervisor.")
@click.option("--engine", is_flag=True, help="Import the engine before HeadLoaded.")
def head_process(fd: int, engine: bool) -> None:
    """Serve as a supervisor's head."""
    end_with(os.getppid())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the supervisor's
    set_up_logging("head")
    from moonpool.runtime.cluster import serve_cluster
    from moonpool.runtime.cluster_error import ClusterError
    from moonpool.runtime.supervisor_link import SupervisorLink

    if engine:
        import moonpool.engine.builtin
        import moonpool.engine.device  # noqa: F401

    async def run() -> None:
        link = SupervisorLink(socket.socket(fileno=fd))
        link.loaded()
        try:
            await serve_cluster(link)
        except ClusterError as error:
            link.failed(str(error))
            os._exit(1)
        except Exception:
            log.exception("the head failed")
            os._exit(1)  # at once: an end in order would end the answers, which can go on
        link.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())
