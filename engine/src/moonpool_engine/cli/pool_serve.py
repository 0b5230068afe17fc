"""`moonpool pool serve`: the KVCache pool of this host, for vLLM and other engines."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
from pathlib import Path
from typing import Any

import click

from moonpool.cli.help_screen import ScreenHelp
from moonpool.cli.logs import choose_logging, log_options, set_up_logging
from moonpool.cli.options import ParamType
from moonpool.cli.output import fail
from moonpool.cli.peer_tls import peer_tls, tls_options
from moonpool.cli.worker import SECRET_VARIABLE, cluster_secret
from moonpool.config.tables import LogFormat, LogLevel, TelemetryConfig
from moonpool.gc_tuning import settle_threads
from moonpool.host_pool.places import default_memory_folder, default_socket
from moonpool_engine.host_pool.pooled_models import HostPoolPlace
from moonpool_engine.host_pool.server import PoolServer
from moonpool_engine.storage.folder import default_folder

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B?|B)?", re.I)
_UNITS = {"": 1, "B": 1, "K": 10, "M": 20, "G": 30, "T": 40}


class ByteSize(ParamType[int]):
    """A number of bytes, such as 8GiB or 500MB; units are powers of 1024."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = _SIZE.fullmatch(str(value).strip())
        if match is None:
            self.fail(f"{value!r} is no size: write 8GiB or 500MiB", param, ctx)
        unit = (match.group(2) or "").upper()
        factor = 1 if unit in ("", "B") else 1 << _UNITS[unit[0]]
        return int(float(match.group(1)) * factor)


BYTES = ByteSize()


@click.command(
    cls=ScreenHelp,
    screen=("--dram", "--ssd", "--ssd-folder", "--models", "--socket", "--memory-folder", "--host"),
)
@click.option(
    "--dram",
    "dram_bytes",
    type=BYTES,
    default="4GiB",
    show_default=True,
    help="Memory for the blocks of all models.",
)
@click.option(
    "--ssd",
    "ssd_bytes",
    type=BYTES,
    default="0",
    help="Room on the SSD for the blocks of all models; none unless given.",
)
@click.option(
    "--ssd-folder",
    "--folder",
    "ssd_folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder on the SSD; in the user's cache folder unless given.",
)
@click.option(
    "--models",
    "num_models",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Models that may have blocks at a time; each gets an equal part of the memory.",
)
@click.option(
    "--socket",
    "socket_path",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Where vLLM's processes find the pool; in the user's runtime folder unless given.",
)
@click.option(
    "--memory-folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder of a tmpfs for the blocks in memory, which outlive this process; in /dev/shm"
    " unless given.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address at which pools of other hosts read blocks; they need the same"
    f" {SECRET_VARIABLE}.",
)
@tls_options
@log_options
def serve(
    dram_bytes: int,
    ssd_bytes: int,
    ssd_folder: Path | None,
    num_models: int,
    socket_path: Path | None,
    memory_folder: Path | None,
    host: str,
    certfile: str,
    keyfile: str,
    ca_certs: str,
    log_level: LogLevel,
    log_format: LogFormat,
) -> None:
    """Keep the KVCache of this host's vLLM servers, in memory and on SSD.

    Each vLLM joins with --kv-transfer-config and the connector MoonpoolConnector. Blocks outlive
    the vLLMs, and this process.
    """
    settle_threads()
    choose_logging(TelemetryConfig(log_level=log_level, log_format=log_format))
    set_up_logging("pool")
    if os.environ.get(SECRET_VARIABLE):
        secret = cluster_secret()
    else:
        secret = secrets.token_bytes(32)  # with a random secret, no other host can read
    folder = ssd_folder
    if ssd_bytes and folder is None:
        folder = default_folder().parent / "pool-ssd"
    place = HostPoolPlace(
        socket_path=socket_path or default_socket(),
        memory_folder=memory_folder or default_memory_folder(),
        dram_bytes=dram_bytes,
        ssd_folder=folder if ssd_bytes else None,
        ssd_bytes=ssd_bytes,
        num_models=num_models,
        listen_host=host,
        secret=secret,
        tls=peer_tls(certfile, keyfile, ca_certs),
    )
    try:
        asyncio.run(_run(place))
    except OSError as error:
        fail(f"the pool cannot serve at {place.socket_path}: {error.strerror or error}")


async def _run(place: HostPoolPlace) -> None:
    task = asyncio.ensure_future(PoolServer(place).run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
