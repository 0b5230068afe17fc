"""`moonpool upgrade`: replaces every process of a running cluster by one that runs the code on
disk."""

from __future__ import annotations

import time
from typing import Any

import click

from moonpool.cli.output import fail
from moonpool.cli.server.address import Server, asks_server
from moonpool.cli.server.client import ClusterClient

_POLL_S = 0.3
_HEAD_S = 300.0
"""Seconds for the next head: it loads its code, and then calls without a kept answer may end."""


@click.command()
@asks_server()
@click.option(
    "--within",
    "within_s",
    type=click.FloatRange(0, 3600),
    default=60.0,
    show_default=True,
    help="Most seconds to drain each instance; after half of them, its requests move.",
)
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(1, 86400),
    default=600.0,
    show_default=True,
    help="Most seconds to wait for the next process of an instance.",
)
def upgrade(server: Server, within_s: float, wait_s: float) -> None:
    """Replace every process of the cluster at URL by one from the code on disk; answers go on.

    Install the new release first. One instance after the other drains and comes back, then head and
    supervisor. The command works on the head's own machine only; workers of other machines must be
    started again by their service manager. The configuration stays the same.
    """
    client = ClusterClient(server)
    first = client.get("/cluster")
    if "head" not in first:
        fail(f"{client.url} shows its processes to the operator's key only: give --api-key")
    for instance in first["instances"]:
        if instance["draining"] is None:
            _replace_instance(client, instance, within_s, wait_s)
    for worker in first["attention"]:
        _replace(client, "attention", worker, within_s, wait_s)
    _replace_head(client, first["head"])


def _replace_instance(
    client: ClusterClient, instance: dict[str, Any], within_s: float, wait_s: float
) -> None:
    """Replaces one instance, unless it has gone in the meantime or has another process already."""
    name = instance["instance_id"]
    now = {one["instance_id"]: one for one in client.get("/cluster")["instances"]}.get(name)
    if now is None or now["pid"] != instance["pid"]:
        click.echo(f"{name}: it has another process already")
        return
    _replace(client, "instances", instance | {"name": name}, within_s, wait_s)


def _replace(
    client: ClusterClient, listed: str, former: dict[str, Any], within_s: float, wait_s: float
) -> None:
    """Drains a process and waits for its successor: a process of the same name, or else a new one
    of its role."""
    name = former["name"]
    known = {_place(one) for one in client.get("/cluster")[listed]}
    body = {"instance_id": name, "within_s": within_s, "returns": True}
    began_s = time.monotonic()
    client.post("/cluster/drain", body)
    while time.monotonic() - began_s < within_s + wait_s:
        time.sleep(_POLL_S)
        for one in client.get("/cluster")[listed]:
            if _place(one) not in known and one.get("role") == former.get("role"):
                _report(name, former, one, began_s)
                return
    fail(
        f"{name} has left, and no process took its place within {wait_s:g} s: start it again, then"
        " run this command again"
    )


def _report(name: str, former: dict[str, Any], now: dict[str, Any], began_s: float) -> None:
    seconds = time.monotonic() - began_s
    click.echo(f"{name}: process {former['pid']} gave way to {now['pid']} in {seconds:.1f} s")


def _place(process: dict[str, Any]) -> tuple[str, int]:
    """Returns what distinguishes a process from all others of the cluster."""
    return process["host"], process["pid"]


def _replace_head(client: ClusterClient, former: dict[str, Any]) -> None:
    began_s = time.monotonic()
    client.post("/cluster/upgrade", {})
    while time.monotonic() - began_s < _HEAD_S:
        time.sleep(_POLL_S)
        head = client.get("/cluster")["head"]
        if head["upgrades"] > former["upgrades"]:
            _report("head", former, head, began_s)
            click.echo(f"the cluster runs release {head['release']}")
            return
        if head["upgrade_error"]:
            fail(f"the head was not replaced: {head['upgrade_error']}")
    fail(f"no new head took over within {_HEAD_S:g} s: see the log of the head")
