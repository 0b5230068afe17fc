"""The owners of holds on blocks. An owner is a job of the instance, named by its kind and its
id."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

OwnerKind = Literal[
    "work",  # an attempt, with its block table
    "fetch",  # an attempt that waits, with its prefix
    "load",  # a load from the SSD
    "hung:load",  # a load that the disk has not returned
    "demote",  # a write to the SSD
    "hung:store",  # a write that the disk has not returned
    "ahead",  # a block that waits to be copied to the SSD
    "read",  # a peer
    "takeover",  # a prefix of an instance that leaves
    "find",  # a client of a host's pool, with the blocks that it may copy
    "store",  # a client of a host's pool, with the blocks that it writes
    # For no longer than one call
    "evict",
    "touch",
    "learn",
]


class BlockOwner(NamedTuple):
    """An owner of holds on blocks, or on slots of the SSD."""

    kind: OwnerKind
    job: str = ""
    """Its id among the owners of this kind."""

    @property
    def name(self) -> str:
        """The owner as reports, `/cluster` and commands have it: "work:r7/1"."""
        return f"{self.kind}:{self.job}"


EVICTION = BlockOwner("evict")
"""Withdraws blocks in order to drop them."""


def owners_of(kind: OwnerKind, jobs: Iterable[str]) -> set[BlockOwner]:
    """Returns the owners of one kind for these jobs."""
    return {BlockOwner(kind, job) for job in jobs}
