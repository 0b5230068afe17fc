"""`moonpool pool`: what the KVCache pool holds, whether its sums balance, and what lies on disk.

`stat`, `audit`, `ls` and `drain` ask a running server; `verify` and `clear` work on the SSD folder
of one that does not run.
"""

from __future__ import annotations

import os
import time
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
_POLL_S = 0.3
_MAX_NAMES = 6


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


@pool.command("ls")
@URL
@API_KEY
@JSON
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True)
def list_hot(url: str, api_key: str | None, json_file: str | None, limit: int) -> None:
    """The prefixes used most: how long, how often, and where they lie.

    HITS counts uses since each instance got its copy. A prefix is named by its last block.
    """
    found = _ask(url, api_key, f"/cluster/hot?limit={limit}")
    click.echo(f"{'last block':<16} {'tokens':>8} {'MiB':>9} {'hits':>7} {'copies':>6}  where")
    for one in found["prefixes"]:
        where = [*one["dram"], *(f"{name} (SSD)" for name in one["ssd"])]
        click.echo(
            f"{one['key'][:16]:<16} {one['tokens']:>8,} {one['bytes'] / (1 << 20):>9.1f}"
            f" {one['hits']:>7,} {one['replicas']:>6}  {_some(where)}"
        )
    if not found["prefixes"]:
        click.echo("nothing is cached yet")
    write_json(json_file, found)


@pool.command()
@click.argument("instance")
@URL
@API_KEY
@JSON
@click.option(
    "--within",
    "within_s",
    type=click.FloatRange(0, 3600),
    default=60.0,
    show_default=True,
    help="Seconds; after half of them, its requests go on elsewhere.",
)
@click.option("--wait/--no-wait", default=True, help="Until it has left.")
def drain(
    instance: str, url: str, api_key: str | None, json_file: str | None, within_s: float, wait: bool
) -> None:
    """Have INSTANCE leave in order: no new requests, its cache handed over, then it ends.

    Only from the head's own machine. Status 1 if it cannot be spared, or has not left in time.
    """
    body = {"instance_id": instance, "within_s": within_s}
    before = _ask(url, api_key, "/cluster").get("drains", {})
    _ask(url, api_key, "/cluster/drain", body)
    if not wait:
        click.echo(f"{instance} drains")
        return
    until_s = time.monotonic() + within_s + _TIMEOUT_S
    while time.monotonic() < until_s:
        time.sleep(_POLL_S)
        cluster = _cluster(url, api_key)
        now = next((i for i in cluster["instances"] if i["instance_id"] == instance), None)
        if now is None or not now["draining"]:
            handed = cluster["drains"]["handed_over_blocks"] - before.get("handed_over_blocks", 0)
            write_json(json_file, {"instance_id": instance, "handed_over_blocks": handed})
            click.echo(f"{instance} has left; others took {handed:,} of its blocks")
            return
    fail(f"{instance} has not left after {within_s + _TIMEOUT_S:.0f} s: see the head's log")


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
    cluster = _ask(url, api_key, "/cluster")
    if "instances" not in cluster:
        fail(f"what answers at {url} is no moonpool server")
    return cluster


def _ask(
    url: str, api_key: str | None, path: str, body: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A question, or with a body an order; whatever goes wrong ends the command with one line."""
    import httpx

    key = api_key or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    whole = f"{url.rstrip('/')}{path}"
    try:
        if body is None:
            answer = httpx.get(whole, headers=headers, timeout=_TIMEOUT_S)
        else:
            answer = httpx.post(whole, headers=headers, json=body, timeout=_TIMEOUT_S)
        if answer.status_code in (403, 409):
            fail(str(answer.json()["error"]["message"]))
        answer.raise_for_status()
        found: Any = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(f"no server answers at {url}: {error}")
    except (ValueError, KeyError, TypeError):
        found = None
    if not isinstance(found, dict):
        fail(f"what answers at {url} is no moonpool server")
    return found


def _some(names: list[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _block_bytes(cluster: dict[str, Any], name: str) -> int:
    sizes = {i["instance_id"]: int(i["pool"]["block_bytes"]) for i in cluster["instances"]}
    return sizes[name]
