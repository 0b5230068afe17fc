"""Checks that the sums of `/cluster` balance: every block of every tier has an owner or is free.

Reads only the JSON of `/cluster`. The figures of an instance are all from the same moment, so a sum
that does not balance shows a bug, not a race.
"""

from __future__ import annotations

from typing import Any

from moonpool.kvcache.block_owner import BlockOwner

_OF_ATTEMPTS = BlockOwner("work").name


def audit_cluster(cluster: dict[str, Any]) -> list[str]:
    """Returns one line per problem."""
    problems: list[str] = []
    for instance in cluster["instances"]:
        name = instance["instance_id"]
        if "held" not in instance["pool"]:
            continue  # the instance has joined but not yet reported its load
        problems += _audit_tier(f"{name} DRAM", instance["pool"])
        if instance.get("ssd"):
            problems += _audit_tier(f"{name} {tier_name(instance)}", instance["ssd"])
        idle = not instance.get("running") and not instance.get("waiting")
        strays = sorted(o for o in instance["pool"]["owners"] if o.startswith(_OF_ATTEMPTS))
        if idle and strays:
            problems.append(f"{name}: no request is running, but blocks are held for {strays[0]}")
    return problems


def tier_rows(cluster: dict[str, Any]) -> list[tuple[str, str, dict[str, Any]]]:
    """Returns (instance, tier, figures) of every tier that has reported."""
    rows = []
    for instance in cluster["instances"]:
        rows.append((instance["instance_id"], "DRAM", instance["pool"]))
        if instance.get("ssd"):
            rows.append((instance["instance_id"], tier_name(instance), instance["ssd"]))
    return [row for row in rows if "held" in row[2]]


def tier_name(instance: dict[str, Any]) -> str:
    """Returns the name of the tier below DRAM."""
    return str(instance["ssd"].get("name", "SSD"))


def _audit_tier(name: str, tier: dict[str, Any]) -> list[str]:
    blocks, held, available = tier["blocks"], tier["held"], tier["available"]
    cached, holds = tier["cached"], sum(tier["owners"].values())
    problems = []
    if held + available != blocks:
        problems.append(
            f"{name}: {held} held plus {available} available blocks are not {blocks} in total"
        )
    if holds < held:
        problems.append(f"{name}: {held} blocks are held, but their owners hold only {holds}")
    if holds and not held:
        problems.append(f"{name}: owners hold {holds} blocks, but no block is held")
    if cached > blocks:
        problems.append(f"{name}: {cached} blocks are cached, but there are only {blocks}")
    return problems
