"""`moonpool bench NAME`: benchmarks, each compared with a limit or a peer in the same run.

The package has the benchmarks that measure a user's own deployment: capacity, store, transfer. A
checkout adds the benchmarks in its folder `benchmarks/`.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path

import click

from moonpool.cli.help_screen import shows_everything
from moonpool.cli.main import SuggestingGroup
from moonpool.cli.options import COUNT, json_option
from moonpool.cli.output import fail, one_line, show_figures
from moonpool_lab.cli.capacity import capacity
from moonpool_lab.cli.checkout import find_checkout


class BenchGroup(SuggestingGroup):
    """The commands of this module and those of a checkout's `benchmarks/`."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists the commands of a checkout by name alone, because they are many, and for
        developers."""
        if shows_everything(ctx):
            super().format_commands(ctx, formatter)
            return
        with formatter.section("Commands"):
            own = sorted(self.commands.items())
            formatter.write_dl([(name, each.get_short_help_str(200)) for name, each in own])
        if others := sorted(_checkout_commands()):
            with formatter.section("Commands of a checkout, for developers"):
                formatter.write_text(", ".join(others))
        formatter.write_paragraph()
        formatter.write_text(f"What each measures: {ctx.command_path} --help all")

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_checkout_commands()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name) or _checkout_commands().get(cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if find_checkout("benchmarks") is None and "Did you mean" not in error.message:
                fail(f"{error.message} Run it from a checkout of moonpool, which has all of them.")
            raise


def _checkout_commands() -> Mapping[str, click.Command]:
    if find_checkout("benchmarks") is None:
        return {}
    group: click.Group = importlib.import_module("benchmarks.cli.commands").bench
    return group.commands


@click.group(cls=BenchGroup)
def bench() -> None:
    """Run a benchmark of one part against a limit or a peer."""


bench.add_command(capacity)


@bench.command()
@click.option(
    "--size-kib",
    "sizes_kib",
    multiple=True,
    type=COUNT,
    default=(64, 256, 1024, 4096, 16384),
    show_default=True,
    help="Size of a block in KiB, a power of two from 64 to 16384; repeat for more.",
)
@click.option(
    "--rounds", type=COUNT, default=15, show_default=True, help="Measure each size this many times."
)
@click.option(
    "--peer-python",
    help="Compare with the Mooncake Store and redis of this Python installation.",
)
@click.option(
    "--cluster-ssl",
    "tls",
    nargs=3,
    metavar="CERT KEY CA",
    help="Measure TCP also with TLS, by these files (PEM) of this machine and its authority.",
)
@json_option
def transfer(
    sizes_kib: tuple[int, ...],
    rounds: int,
    peer_python: str | None,
    tls: tuple[str, str, str] | None,
    json_file: str | None,
) -> None:
    """Move blocks between two processes, against memcpy, sockets, the Mooncake Store and Redis."""
    from moonpool.link.tls import PeerTls, PeerTlsError
    from moonpool_lab.profiling.transfer_speed import TransferBenchError, bench_transfer

    if any(size & (size - 1) or not 64 <= size <= 16384 for size in sizes_kib):
        fail("--size-kib must be a power of two from 64 to 16384")
    sizes = tuple(size << 10 for size in sizes_kib)
    with one_line(TransferBenchError, PeerTlsError):
        if tls:
            PeerTls(*tls)
        found = bench_transfer(sizes, rounds, peer_python, click.echo, tls)
    show_figures(found, json_file)


@bench.command()
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Folder on the disk to measure; where a server keeps its blocks unless given.",
)
@click.option(
    "--gib",
    type=click.FloatRange(min=0.01),
    default=1.0,
    show_default=True,
    help="Write and read this many GiB.",
)
@click.option(
    "--block-tokens",
    multiple=True,
    type=COUNT,
    default=(16, 64),
    show_default=True,
    help="Tokens of one block; repeat for more.",
)
@click.option(
    "--repeats", type=COUNT, default=3, show_default=True, help="Measure each case this many times."
)
@json_option
def store(
    folder: Path | None,
    gib: float,
    block_tokens: tuple[int, ...],
    repeats: int,
    json_file: str | None,
) -> None:
    """Measure the SSD store, against a file written and read in order on the same disk."""
    from moonpool_engine.storage.folder import StoreError, default_folder
    from moonpool_engine.transfer.arena import ArenaError
    from moonpool_lab.profiling.store_speed import StoreBenchError, bench_store

    try:
        found = bench_store(folder or default_folder(), gib, block_tokens, repeats, click.echo)
    except (ArenaError, StoreBenchError, StoreError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"the disk cannot be measured: {error}")
    show_figures(found, json_file)
