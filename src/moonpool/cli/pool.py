"""`moonpool pool`: what the KVCache pool holds, whether its sums balance, and what lies on disk.

`stat`, `audit`, `ls` and `drain` query a running server. The engine's package adds `verify` and
`clear`, which work on the SSD folder of a server that does not run.
"""

from __future__ import annotations

import time
from typing import Any, ClassVar

import click

from moonpool.cli.main import ExtendedGroup
from moonpool.cli.options import json_option
from moonpool.cli.output import fail, write_json
from moonpool.cli.server.address import Server, asks_server
from moonpool.cli.server.client import ClusterClient

_GIB = float(1 << 30)
_LATE_S = 30.0
"""How much later than asked for an instance may leave."""
_POLL_S = 0.3
_MAX_NAMES = 6


class PoolGroup(ExtendedGroup):
    prefix: ClassVar[str] = "pool "


@click.group(cls=PoolGroup)
def pool() -> None:
    """Show what the KVCache pool holds, in memory and on disk."""


@pool.command()
@asks_server(former_flag="--url")
@json_option
def stat(server: Server, json_file: str | None) -> None:
    """Show blocks and moved bytes of each instance.

    A line for each tier: memory, disk.
    """
    from moonpool.head.audit import tier_name, tier_rows

    cluster = _cluster(ClusterClient(server))
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
        damaged = int(counters.get("ssd_damaged_blocks", 0))
        if damaged:
            text = f"{damaged:,} blocks were damaged, {tier_name(instance)}"
            click.echo(f"{name}: {text}; its log names the files")
    write_json(json_file, cluster)


@pool.command()
@asks_server(former_flag="--url")
@json_option
def audit(server: Server, json_file: str | None) -> None:
    """List which owner holds how many blocks, and check the sums.

    Ends with status 1 if the sums do not balance.
    """
    from moonpool.head.audit import audit_cluster, tier_rows

    cluster = _cluster(ClusterClient(server))
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
@asks_server(former_flag="--url")
@json_option
@click.option(
    "--limit",
    type=click.IntRange(1, 1000),
    default=20,
    show_default=True,
    help="Most prefixes to list.",
)
def list_hot(server: Server, json_file: str | None, limit: int) -> None:
    """List the most used prefixes with their length, hits and places.

    HITS counts uses since each instance got its copy. A NAME follows from the hash of the prefix's
    last block, which --json has, so it stays the same.
    """
    found = ClusterClient(server).get(f"/cluster/hot?limit={limit}")
    click.echo(f"{'name':<19} {'tokens':>8} {'MiB':>9} {'hits':>7} {'copies':>6}  where")
    for one in found["prefixes"]:
        name = one.get("name") or one["key"][:16]  # a server of an earlier release sends no name
        where = [*one["dram"], *(f"{name} (SSD)" for name in one["ssd"])]
        click.echo(
            f"{name:<19} {one['tokens']:>8,} {one['bytes'] / (1 << 20):>9.1f}"
            f" {one['hits']:>7,} {one['replicas']:>6}  {_some(where)}"
        )
    if not found["prefixes"]:
        click.echo("nothing is cached yet")
    write_json(json_file, found)


@pool.command()
@click.argument("instance")
@asks_server(former_flag="--url")
@json_option
@click.option(
    "--within",
    "within_s",
    type=click.FloatRange(0, 3600),
    default=60.0,
    show_default=True,
    help="Most seconds for the drain; after half of them, its requests move to other instances.",
)
@click.option("--wait/--no-wait", default=True, help="Wait until the instance has left.")
def drain(
    instance: str, server: Server, json_file: str | None, within_s: float, wait: bool
) -> None:
    """Drain INSTANCE: it gets no new requests, hands over its cached blocks, and ends.

    This works on the head's own machine only. Ends with status 1 if the cluster needs the instance,
    or if it has not left in time.
    """
    client = ClusterClient(server)
    before = _cluster(client).get("drains", {})
    client.post("/cluster/drain", {"instance_id": instance, "within_s": within_s})
    if not wait:
        click.echo(f"{instance} drains")
        return
    until_s = time.monotonic() + within_s + _LATE_S
    while time.monotonic() < until_s:
        time.sleep(_POLL_S)
        cluster = _cluster(client)
        now = next((i for i in cluster["instances"] if i["instance_id"] == instance), None)
        if now is None or not now["draining"]:
            handed = cluster["drains"]["handed_over_blocks"] - before.get("handed_over_blocks", 0)
            write_json(json_file, {"instance_id": instance, "handed_over_blocks": handed})
            click.echo(f"{instance} has left; others took {handed:,} of its blocks")
            return
    fail(f"{instance} has not left after {within_s + _LATE_S:.0f} s: see the head's log")


def _cluster(client: ClusterClient) -> dict[str, Any]:
    cluster = client.get("/cluster")
    if "instances" not in cluster:
        fail(f"{client.url} is no moonpool server: correct the URL")
    return cluster


def _some(names: list[str]) -> str:
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")


def _block_bytes(cluster: dict[str, Any], name: str) -> int:
    sizes = {i["instance_id"]: int(i["pool"]["block_bytes"]) for i in cluster["instances"]}
    return sizes[name]
