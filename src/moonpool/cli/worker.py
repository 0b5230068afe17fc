"""`moonpool worker`: one instance in one process."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import sys
from typing import TYPE_CHECKING, Protocol, cast

import click
import uvloop

from moonpool.cli.output import fail, set_up_logging
from moonpool.config import ConfigError, VllmPlace, vllm_place
from moonpool.messenger.parent import end_with
from moonpool.runtime.settle import settle_threads
from moonpool.types import InstanceId, Role

if TYPE_CHECKING:
    from moonpool.runtime.attention_worker import AttentionWorker
    from moonpool.runtime.cores import CoreShare

SECRET_VARIABLE = "MOONPOOL_CLUSTER_SECRET"  # noqa: S105 - its name, not its value
API_KEY_VARIABLE = "VLLM_API_KEY"
ATTENTION = "attention"
GRACE_S = 2.0
"""So long after its time a worker waits for the head's word that it may go."""


def cluster_secret() -> bytes:
    """From the environment: a command line is visible to every user of the machine."""
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


@click.command()
@click.option("--role", type=click.Choice([*(r.value for r in Role), ATTENTION]), required=True)
@click.option("--head", "head_address", required=True, metavar="HOST:PORT")
@click.option("--name", help="Name of the instance (default: role and a random suffix).")
@click.option("--host", help="Address to listen at for peers (default: the one facing the head).")
@click.option(
    "--pipeline-parallel-size",
    "num_stages",
    type=click.IntRange(1, 64),
    help="Processes, each with a share of the layers (default: as the head says).",
)
@click.option(
    "--tensor-parallel-size",
    "num_ranks",
    type=click.IntRange(1, 16),
    help="Processes, each with a share of every layer (default: as the head says).",
)
@click.option(
    "--drain-seconds",
    type=click.FloatRange(min=0, max=3600),
    default=25.0,
    show_default=True,
    help="At SIGTERM, let requests end and hand over what is cached, for so long; 0: end at once.",
)
@click.option(
    "--vllm",
    "place",
    metavar="URL[,EVENTS[,REPLAY]]",
    help="Stand before this vLLM instead of computing; and where it publishes KV events and repeats"
    " them. Its API key: VLLM_API_KEY in the environment.",
)
@click.option("--cores", default="", help="Of the engine's threads, such as 0-3 (default: any).")
@click.option("--other-cores", default="", help="Of all other threads, likewise.")
@click.option("--exit-with-head", is_flag=True, help="End when the head does.")
def worker(
    role: str,
    head_address: str,
    name: str | None,
    host: str | None,
    num_stages: int | None,
    num_ranks: int | None,
    drain_seconds: float,
    place: str | None,
    cores: str,
    other_cores: str,
    exit_with_head: bool,
) -> None:
    """Start one instance of ROLE; it takes model and settings from the head it joins."""
    head_host, _, port = head_address.rpartition(":")
    if not head_host or not port.isdigit():
        fail(f"--head must be HOST:PORT, not {head_address!r}")
    name = name or f"{role}-{secrets.token_hex(3)}"
    set_up_logging(name)
    settle_threads()
    secret = cluster_secret()
    if exit_with_head:
        end_with(os.getppid())
    from moonpool.runtime.head_link import HungError, WorkerError

    share = _core_share(cores, other_cores)
    vllm = None if place is None else _place(place, role)

    async def run() -> None:
        machine = socket.gethostname()
        this: Leaver | AttentionWorker
        if vllm is not None:
            from moonpool.vllm.worker import VllmWorker

            key = os.environ.get(API_KEY_VARIABLE, "")
            this = VllmWorker(Role(role), InstanceId(name), machine, secret, vllm, key)
        elif role == ATTENTION:
            from moonpool.runtime.attention_worker import AttentionWorker

            this = AttentionWorker(InstanceId(name), machine, host, secret)
        else:
            from moonpool.runtime.worker import Worker

            me = (Role(role), InstanceId(name), machine, host, secret, share)
            this = Worker(*me, num_stages, num_ranks)
        _end_in_order(None if role == ATTENTION else cast(Leaver, this), drain_seconds)
        await this.run(head_host.strip("[]"), int(port), reconnect=not exit_with_head)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run())
    except HungError as error:
        sys.stderr.write(f"moonpool: {error}\n")
        sys.stderr.flush()
        os._exit(1)  # an exit in order would wait for the thread that hangs
    except WorkerError as error:
        fail(str(error))
    except asyncio.CancelledError:
        raise SystemExit(0) from None


class Leaver(Protocol):
    """A worker whose instance can be drained before it ends."""

    def ask_to_leave(self, within_s: float) -> bool: ...

    async def run(self, head_host: str, head_port: int, reconnect: bool) -> None: ...


def _end_in_order(this: Leaver | None, drain_seconds: float) -> None:
    """What signals do to the present task: SIGTERM has an instance drained first, if it can be; a
    second one ends it at once."""
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None

    def leave() -> None:
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
        if this is None or not drain_seconds or not this.ask_to_leave(drain_seconds):
            task.cancel()
            return
        loop.call_later(drain_seconds + GRACE_S, task.cancel)

    loop.add_signal_handler(signal.SIGINT, task.cancel)
    loop.add_signal_handler(signal.SIGTERM, leave)


def _place(text: str, role: str) -> VllmPlace:
    if role == ATTENTION:
        fail("--vllm does not go with --role attention")
    try:
        return vllm_place(text)
    except ConfigError as error:
        fail(f"--vllm: {error}")


def _core_share(cores: str, other_cores: str) -> CoreShare:
    """This process's threads, all but the engine's, are pinned to their cores."""
    from moonpool.runtime.cores import CoreShare, parse_cores, pin_thread

    try:
        share = CoreShare(parse_cores(cores), parse_cores(other_cores))
    except ValueError:
        fail("--cores and --other-cores must be lists such as 0-3,8")
    pin_thread(share.others)
    return share
