"""`moonpool rank`: a further rank of an instance. Workers start it; nobody else needs to."""

from __future__ import annotations

import signal
import socket

import click

from moonpool.cli.output import set_up_logging
from moonpool.runtime.settle import settle_threads


@click.command(hidden=True)
@click.option("--of", "owner", required=True, help="The instance.")
@click.option("--number", type=int, required=True, help="Which rank; the worker is the first.")
@click.option("--control-fd", type=int, required=True, help="A socket to the first rank.")
def rank(owner: str, number: int, control_fd: int) -> None:
    """One rank of a tensor-parallel instance; started by its worker."""
    set_up_logging(f"{owner}/rank-{number}")
    settle_threads()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the worker ends it
    from moonpool.engine.tensor.process import run_rank

    run_rank(socket.socket(fileno=control_fd))
