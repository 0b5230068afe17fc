"""`moonpool pool`: what the KVCache pool holds, whether its sums balance, and what lies on disk.

`stat`, `audit` and `ls` ask a running server; `verify` and `clear` work on the SSD folder of one
that does not run.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from moonpool.cli.output import fail, write_json

URL = click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server.")
API_KEY = click.option("--api-key", help="Bearer key; else OPENAI_API_KEY.")
JSON = click.option("--json", "json_file", type=click.Path(dir_okay=False), help="Write figures.")
FOLDER = click.argument("folder", required=False, type=click.Path(file_okay=False, path_type=Path))
_GIB = float(1 << 30)
_TIMEOUT_S = 30.0


@click.group()
def pool() -> None:
    """What the KVCache pool holds, in memory and on disk."""


@pool.command()
@URL
@API_KEY
@JSON
def stat(url: str, api_key: str | None, json_file: str | None) -> None:
    """Blocks of every tier of every instance, and what was moved between them."""
    from moonpool.runtime.audit import tier_name, tier_rows

    cluster = _cluster(url, api_key)
    click.echo(f"{'instance':<16} {'tier':<8} {'blocks':>9} {'held':>8} {'named':>9} {'GiB':>8}")
    for name, tier, figures in tier_rows(cluster):
        gib = figures["blocks"] * _block_bytes(cluster, name) / _GIB
        click.echo(
            f"{name:<16} {tier:<8} {figures['blocks']:>9,} {figures['held']:>8,}"
            f" {figures['cached']:>9,} {gib:>8.2f}"
        )
    for instance in cluster["instances"]:
        ssd = instance.get("ssd")
        if not ssd:
            continue
        name, counters = instance["instance_id"], instance.get("counters", {})
        if ssd.get("error"):
            click.echo(f"{name}: the {tier_name(instance)} tier is gone: {ssd['error']}")
            continue
        for what, verb in (("written", "write"), ("read", "read")):
            num_bytes = counters.get(f"ssd_{what}_bytes", 0.0)
            seconds = counters.get(f"ssd_{verb}_seconds", 0.0)
            rate = f", {num_bytes / seconds / 1e9:.2f} GB/s a thread" if seconds else ""
            click.echo(f"{name}: {num_bytes / 1e9:.2f} GB {what}, {tier_name(instance)}{rate}")
    write_json(json_file, cluster)


@pool.command()
@URL
@API_KEY
@JSON
def audit(url: str, api_key: str | None, json_file: str | None) -> None:
    """Who holds how many blocks, and whether the sums balance. Status 1 if they do not."""
    from moonpool.runtime.audit import audit_cluster, tier_rows

    cluster = _cluster(url, api_key)
    for name, tier, figures in tier_rows(cluster):
        click.echo(
            f"{name} {tier}: {figures['held']:,} held + {figures['available']:,} available"
            f" = {figures['blocks']:,} blocks, {figures['cached']:,} with a name"
        )
        for owner, holds in sorted(figures["owners"].items()):
            click.echo(f"  {owner:<40} {holds:>8,}")
    problems = audit_cluster(cluster)
    write_json(json_file, {"problems": problems, "cluster": cluster})
    if problems:
        fail("the sums do not balance: " + "; ".join(problems))
    click.echo("the sums balance")


@pool.command()
@FOLDER
@JSON
def verify(folder: Path | None, json_file: str | None) -> None:
    """Read back all of an SSD FOLDER and check every slice. Status 1 if any is damaged.

    FOLDER is that of one instance or the one above (the default: where servers keep theirs).
    """
    from moonpool.messenger.store.folder import StoreError
    from moonpool.messenger.store.verify import verify_folder

    found = []
    try:
        for path in _stores(folder):
            one = verify_folder(path)
            found.append(one)
            click.echo(
                f"{one.folder}: {one.blocks:,} blocks of {one.block_bytes / (1 << 20):.2f} MiB,"
                f" {one.bad_blocks} damaged; {one.bytes / 1e9:.2f} GB read"
                f" at {one.bytes_per_s / 1e9:.2f} GB/s"
            )
            if one.index == "missing":
                click.echo("  it has no readable index; the next start makes it anew")
            if one.bad_slots:
                click.echo(f"  damaged slots: {', '.join(map(str, one.bad_slots))}")
    except StoreError as error:
        fail(str(error))
    bad = sum(one.bad_blocks for one in found)
    write_json(json_file, {"folders": found, "bad_blocks": bad})
    if bad:
        fail(f"{bad} blocks are damaged; a server takes them for misses and forgets them")


@pool.command()
@FOLDER
def clear(folder: Path | None) -> None:
    """Delete all blocks of an SSD FOLDER, and no other files."""
    from moonpool.messenger.store.folder import StoreError
    from moonpool.messenger.store.verify import clear_folder

    try:
        for path in _stores(folder):
            click.echo(f"{path}: {clear_folder(path) / _GIB:.2f} GiB freed")
    except StoreError as error:
        fail(str(error))


def _stores(folder: Path | None) -> list[Path]:
    from moonpool.messenger.store.folder import default_folder, stores_below

    root = folder or default_folder()
    found = stores_below(root)
    if not found:
        fail(f"no instance keeps blocks in {root}")
    return found


def _cluster(url: str, api_key: str | None) -> dict[str, Any]:
    import httpx

    key = api_key or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/cluster", headers=headers, timeout=_TIMEOUT_S)
        answer.raise_for_status()
        cluster: dict[str, Any] = answer.json()
        cluster["instances"]
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(f"no server answers at {url}: {error}")
    except (ValueError, KeyError, TypeError):
        fail(f"what answers at {url} is no moonpool server")
    return cluster


def _block_bytes(cluster: dict[str, Any], name: str) -> int:
    sizes = {i["instance_id"]: int(i["pool"]["block_bytes"]) for i in cluster["instances"]}
    return sizes[name]
