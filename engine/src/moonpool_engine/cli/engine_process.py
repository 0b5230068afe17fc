"""`moonpool stage` and `moonpool rank`: further processes of an instance, which workers start."""

from __future__ import annotations

import signal
import socket

import click

from moonpool.cli.logs import set_up_logging
from moonpool.gc_tuning import settle_threads


@click.command(hidden=True)
@click.option("--of", "owner", required=True, help="Name of the instance.")
@click.option("--number", type=int, required=True, help="Number of the stage; the worker is 1.")
@click.option("--control-fd", type=int, required=True, help="Socket to the first stage.")
def stage(owner: str, number: int, control_fd: int) -> None:
    """Run one pipeline stage of an instance. The worker of the instance starts this command."""
    _begin(f"{owner}/stage-{number}")
    from moonpool_engine.engine.parallel.stage_process import run_stage

    run_stage(socket.socket(fileno=control_fd))


@click.command(hidden=True)
@click.option("--of", "owner", required=True, help="Name of the instance.")
@click.option("--number", type=int, required=True, help="Number of the rank; the worker is 1.")
@click.option("--control-fd", type=int, required=True, help="Socket to the first rank.")
def rank(owner: str, number: int, control_fd: int) -> None:
    """Run one rank of a tensor-parallel instance. The worker of the instance starts this
    command."""
    _begin(f"{owner}/rank-{number}")
    from moonpool_engine.engine.parallel.tensor_process import run_rank

    run_rank(socket.socket(fileno=control_fd))


def _begin(name: str) -> None:
    set_up_logging(name)
    settle_threads()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker ends this process
