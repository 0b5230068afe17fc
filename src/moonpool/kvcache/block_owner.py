"""The owners of holds on blocks. An owner is a job of the instance, named by its kind and its
id."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

OwnerKind = Literal[
    "work",  # an attempt that holds its block table
    "fetch",  # an attempt that waits and holds its prefix
    "load",  # a load from the SSD into blocks
    "hung:load",  # a load that the disk has not returned
    "demote",  # a write of blocks to the SSD
    "hung:store",  # a write that the disk has not returned
    "ahead",  # a block that waits to be copied to the SSD
    "read",  # a peer
    "takeover",  # a takeover of a prefix from an instance that leaves
    "find",  # a client of a host's pool that may copy these blocks
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
    """The id of the job among the owners of this kind."""

    @property
    def name(self) -> str:
        """Returns the owner's name in reports, `/cluster` and commands, such as "work:r7/1"."""
        return f"{self.kind}:{self.job}"


EVICTION = BlockOwner("evict")
"""The owner of blocks that are withdrawn in order to be dropped."""


def owners_of(kind: OwnerKind, jobs: Iterable[str]) -> set[BlockOwner]:
    """Returns the owners of one kind for these jobs."""
    return {BlockOwner(kind, job) for job in jobs}
