"""The resources that a cluster requests from Ray: a bundle for each process, in placement
groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from moonpool.config.tables import Config, RayConfig
from moonpool.types import Role

Bundle = dict[str, float]
"""Amounts by the names of Ray's resources."""

HEAD = "head"
ATTENTION = "attention"
HEAD_BUNDLE: Bundle = {"CPU": 1.0}


@dataclass(frozen=True, slots=True)
class Member:
    """A process of the cluster. `role`: the role of its command line, or "head"."""

    name: str
    role: str
    bundle: Bundle


@dataclass(frozen=True, slots=True)
class ActorGroup:
    """Members that Ray places as one group, spread over as many nodes as possible."""

    name: str
    members: tuple[Member, ...]


def first_groups(config: Config, num_heads: int) -> list[ActorGroup]:
    """The groups of a new cluster: one for the heads, and one for each role. So a lost node takes
    as few instances of each role as possible."""
    cluster = config.cluster
    counts = {
        HEAD: num_heads,
        Role.PREFILL.value: cluster.prefill,
        Role.DECODE.value: cluster.decode,
        Role.MIXED.value: cluster.mixed,
        ATTENTION: cluster.attention,
    }
    return [
        ActorGroup(role, tuple(member_of(config, role, number) for number in range(count)))
        for role, count in counts.items()
        if count
    ]


def total_of(groups: Iterable[ActorGroup]) -> Bundle:
    """Returns the sum of the resources that the members of these groups request."""
    total: Bundle = {}
    for group in groups:
        for member in group.members:
            for resource, amount in member.bundle.items():
                total[resource] = total.get(resource, 0.0) + amount
    return total


def lacking(total: Bundle, there: Mapping[str, float]) -> str:
    """Returns, as text, the requested resources that the cluster lacks; "" means none."""
    more = (
        f"{amount:g} of {resource!r} (there are {there.get(resource, 0.0):g})"
        for resource, amount in sorted(total.items())
        if amount > there.get(resource, 0.0)
    )
    return ", ".join(more)


def added_group(config: Config, role: Role, number: int) -> ActorGroup:
    """The group of one further instance, which can be given back alone."""
    member = member_of(config, role.value, number)
    return ActorGroup(member.name, (member,))


def member_of(config: Config, role: str, number: int) -> Member:
    return Member(f"{role}-{number}", role, bundle_of(config, role))


def bundle_of(config: Config, role: str) -> Bundle:
    """Returns the resources that a process with this role needs on one node."""
    if role == HEAD:
        return dict(HEAD_BUNDLE)
    ray = config.ray
    parts = 1 if role == ATTENTION else config.engine.degree(Role(role)).num_processes
    bundle: Bundle = {"CPU": ray.cpus * parts}
    if ray.memory_bytes:
        bundle["memory"] = float(ray.memory_bytes)
    if role == ATTENTION:
        return bundle
    if ray.gpus:
        bundle["GPU"] = ray.gpus * parts
    if ray.ssd_resource:
        bundle[ray.ssd_resource] = 1.0
    return bundle


def settled(config: Config) -> Config:
    """Returns the configuration of the processes: each computes with the CPUs and GPUs that Ray has
    set aside for it, and starts no other processes."""
    engine, ray = config.engine, config.ray
    threads = engine.threads or max(int(ray.cpus), 1)
    device = "cuda" if ray.gpus and engine.device == "auto" else engine.device
    return replace(
        config,
        engine=replace(engine, threads=threads, device=device),
        cluster=replace(config.cluster, launcher="local"),
        ray=RayConfig(),
    )
