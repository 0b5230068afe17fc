"""Computes which instances to add or to release, from the numbers that the Conductor wants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from moonpool.conductor.actions import InstancesWanted
from moonpool.types import Role, Struct


class Change(Struct, frozen=True, kw_only=True):
    """`add` and `remove` have the numbers in the names of instances of one role."""

    role: Role
    add: tuple[int, ...] = ()
    remove: tuple[int, ...] = ()


def changes(
    wanted: InstancesWanted,
    least: Mapping[Role, int],
    most: int,
    present: Mapping[Role, Iterable[int]],
) -> list[Change]:
    """Returns the roles whose number changes. `least`: the number of instances of each role that
    always run, which have the first numbers. `most`: the limit of each role. `present`: the numbers
    of the present members beyond the first."""
    found = []
    for role, count in ((Role.PREFILL, wanted.prefill), (Role.DECODE, wanted.decode)):
        first = least.get(role, 0)
        room = max(min(count, most) - first, 0)
        own = sorted(present.get(role, ()))
        if len(own) > room:
            found.append(Change(role=role, remove=tuple(own[room:])))
        elif len(own) < room:
            free = (n for n in range(first, first + room + len(own)) if n not in own)
            add = tuple(number for number, _ in zip(free, range(room - len(own)), strict=False))
            found.append(Change(role=role, add=add))
    return found
