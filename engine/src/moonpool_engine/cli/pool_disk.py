"""`moonpool pool verify` and `pool clear`: the SSD folder of a server that does not run."""

from __future__ import annotations

from pathlib import Path

import click

from moonpool.cli.options import json_option
from moonpool.cli.output import fail, one_line, write_json
from moonpool_engine.storage.folder import StoreError, default_folder, stores_below
from moonpool_engine.storage.verify import clear_folder, verify_folder

FOLDER = click.argument("folder", required=False, type=click.Path(file_okay=False, path_type=Path))
_GIB = float(1 << 30)


@click.command()
@FOLDER
@json_option
def verify(folder: Path | None, json_file: str | None) -> None:
    """Read all of an SSD FOLDER and check every slice. Ends with status 1 if any is damaged.

    FOLDER is that of one instance or the one above; by default, where servers keep theirs.
    """
    found = []
    with one_line(StoreError):
        for path in _stores(folder):
            one = verify_folder(path)
            found.append(one)
            click.echo(
                f"{one.folder}: {one.blocks:,} blocks of {one.block_bytes / (1 << 20):.2f} MiB,"
                f" {one.bad_blocks} damaged; {one.bytes / 1e9:.2f} GB read"
                f" at {one.bytes_per_s / 1e9:.2f} GB/s"
            )
            if one.index == "missing":
                click.echo("  it has no readable index; the next start rebuilds it")
            if one.bad_slots:
                click.echo(f"  damaged slots: {', '.join(map(str, one.bad_slots))}")
    bad = sum(one.bad_blocks for one in found)
    write_json(json_file, {"folders": found, "bad_blocks": bad})
    if bad:
        fail(f"{bad} blocks are damaged; a server treats them as misses and drops them")


@click.command()
@FOLDER
def clear(folder: Path | None) -> None:
    """Delete all blocks of an SSD FOLDER, and no other files."""
    with one_line(StoreError):
        for path in _stores(folder):
            click.echo(f"{path}: {clear_folder(path) / _GIB:.2f} GiB freed")


def _stores(folder: Path | None) -> list[Path]:
    root = folder or default_folder()
    found = stores_below(root)
    if not found:
        fail(f"no instance keeps blocks in {root}")
    return found
