"""Events that the messenger and the SSD store send to the instance that owns the blocks.

Every operation ends with exactly one terminal event, marked (terminal). Until then the messenger
may read or write the operation's blocks, so they must stay held; afterwards it never does. Fetches,
and loads by layer, bring one layer of all blocks after another, and report their progress from time
to time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from moonpool.types import BlockId, BlockKey, InstanceId, Struct


class SpaceAddress(Struct, frozen=True):
    """The address of the messenger of one space of blocks. Messengers with equal `host_id` can use
    shared memory."""

    instance_id: InstanceId
    host_id: str
    unix_name: str  # name of an abstract unix socket (which leaves no file), or "" if there is none
    tcp_host: str
    tcp_port: int
    nixl_port: int = 0  # port on which its NIXL agent listens; 0 means no NIXL


class PeerAddress(SpaceAddress, frozen=True):
    """The address of an instance's messenger. `others`: for a pool that keeps a block in several
    spaces, the addresses of the further ranks, in their order."""

    others: tuple[SpaceAddress, ...] = ()

    @property
    def spaces(self) -> tuple[PeerAddress, ...]:
        """The spaces of all ranks, as peers to fetch from."""
        return tuple(PeerAddress(*_fields(each)) for each in (self, *self.others))

    @classmethod
    def of_spaces(cls, spaces: Sequence[PeerAddress]) -> PeerAddress:
        """The address of a pool with these spaces, by rank."""
        others = tuple(SpaceAddress(*_fields(each)) for each in spaces[1:])
        return replace(spaces[0], others=others)


def _fields(space: SpaceAddress) -> list[Any]:
    return [getattr(space, name) for name in SpaceAddress.__struct_fields__]


class FetchEnded(Struct, frozen=True, tag=True):
    """(terminal) A fetch of cached blocks has ended: the first `num_blocks` arrived with valid
    checksums."""

    fetch_id: str
    num_blocks: int
    corrupt_slices: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    error: str = ""


class FetchProgress(Struct, frozen=True, tag=True):
    """The source grants the first `num_blocks` blocks of a fetch. The first `num_layers` layers of
    all blocks have arrived with valid checksums, `seconds` after the first layer could begin.
    Another route to the source may report fewer layers again."""

    fetch_id: str
    num_blocks: int
    num_layers: int = 0
    seconds: float = 0.0


class ReadRequested(Struct, frozen=True, tag=True):
    """A peer requests blocks by key. Reply with `Messenger.grant(read_id, block_ids)`."""

    read_id: str
    keys: tuple[BlockKey, ...]


class ReadEnded(Struct, frozen=True, tag=True):
    """(terminal) The peer has read the granted blocks, or died, or its lease expired. `corrupt` are
    the blocks that changed in this instance's memory after their checksums were computed."""

    read_id: str
    corrupt: tuple[BlockId, ...] = ()
    error: str = ""


class SendEnded(Struct, frozen=True, tag=True):
    """(terminal) An outgoing layer stream has ended: the peer received everything, unless `error`
    is set."""

    stream_id: str
    num_bytes: int = 0
    seconds: float = 0.0
    error: str = ""


class ReceiveEnded(Struct, frozen=True, tag=True):
    """(terminal) An incoming layer stream has ended. `incomplete` are the indices, in the request's
    block table, of blocks that lack a slice. All other blocks are complete and verified, even if
    `error` is set. A slice is missing because it did not arrive, or because its checksum differs.
    Only the latter count as `corrupt_slices`, which indicate damage. The end of a sender damages
    nothing.
    """

    stream_id: str
    incomplete: tuple[int, ...] = ()
    corrupt_slices: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    error: str = ""


class StoreEnded(Struct, frozen=True, tag=True):
    """(terminal) A write to the SSD has ended: the first `num_blocks` are safely stored. `hung`:
    whether the disk has not responded, so that it may still write to the slots until
    `StoreReturned`."""

    store_id: str
    num_blocks: int
    num_bytes: int = 0
    seconds: float = 0.0
    error: str = ""
    hung: bool = False


class LoadEnded(Struct, frozen=True, tag=True):
    """(terminal) A read from the SSD has ended: the first `num_blocks` arrived with valid
    checksums. `hung`: whether the disk has not responded, so that it may still write to the other
    blocks until `LoadReturned`."""

    load_id: str
    num_blocks: int
    corrupt_slices: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    error: str = ""
    hung: bool = False


class LoadProgress(Struct, frozen=True, tag=True):
    """Progress of a load by layer: of all its blocks, the first `num_layers` layers have arrived
    with valid checksums, `seconds` after it began."""

    load_id: str
    num_layers: int = 0
    seconds: float = 0.0


class LoadReturned(Struct, frozen=True, tag=True):
    """The disk has released the blocks of a hung load."""

    load_id: str


class StoreReturned(Struct, frozen=True, tag=True):
    """The disk has released the slots of a hung store."""

    store_id: str


class TierPaused(Struct, frozen=True, tag=True):
    """The SSD does not respond: it gets no more operations until `TierResumed`. The blocks of the
    tier still count as present."""

    error: str


class TierResumed(Struct, frozen=True, tag=True):
    """The SSD responds again."""


class LookUpEnded(Struct, frozen=True, tag=True):
    """(terminal) A look-up in the shared store has ended: the store holds the first
    `num_blocks`."""

    lookup_id: str
    num_blocks: int
    error: str = ""


class StoreLost(Struct, frozen=True, tag=True):
    """The SSD tier is lost for good (a disk error, a removed folder). Stores and loads under way
    still end, each with its own event."""

    error: str


MessengerEvent = (
    FetchProgress
    | FetchEnded
    | ReadRequested
    | ReadEnded
    | SendEnded
    | ReceiveEnded
    | StoreEnded
    | LoadProgress
    | LoadEnded
    | LookUpEnded
    | LoadReturned
    | StoreReturned
    | StoreLost
    | TierPaused
    | TierResumed
)
