"""What whoever moves the blocks tells the state machine that owns them, each thing exactly once.

Every operation the worker starts ends with exactly one terminal event, marked (terminal). Until
then the messenger may read or write the operation's blocks, so they must stay held; afterwards it
never will. Fetches bring one layer of all their blocks after the other, and say now and then how
far they are, and so do loads that were asked to.
"""

from __future__ import annotations

from moonpool.types import BlockId, BlockKey, InstanceId, Struct


class PeerAddress(Struct, frozen=True):
    """Where an instance's messenger listens. `host_id` tells whether shared memory can be used."""

    instance_id: InstanceId
    host_id: str
    unix_name: str  # abstract unix socket (no file to leave behind), "" if none
    tcp_host: str
    tcp_port: int
    nixl_port: int = 0  # where it meets those that have NIXL, too; 0 if it has not


class FetchEnded(Struct, frozen=True, tag=True):
    """(terminal) A fetch of cached blocks: the first `num_blocks` arrived, their checksums hold."""

    fetch_id: str
    num_blocks: int
    corrupt_slices: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    error: str = ""


class FetchProgress(Struct, frozen=True, tag=True):
    """The source lends the first `num_blocks` blocks of a fetch, and of all of them the first
    `num_layers` layers have arrived and hold, `seconds` after the first could. May be told anew by
    another way to the source, with fewer."""

    fetch_id: str
    num_blocks: int
    num_layers: int = 0
    seconds: float = 0.0


class ReadRequested(Struct, frozen=True, tag=True):
    """A peer asks for blocks by key; answer with `Messenger.grant(read_id, block_ids)`."""

    read_id: str
    keys: tuple[BlockKey, ...]


class ReadEnded(Struct, frozen=True, tag=True):
    """(terminal) The peer is done with the granted blocks, or died, or let its lease run out.
    `corrupt` are those of them that changed in our own memory since they were made."""

    read_id: str
    corrupt: tuple[BlockId, ...] = ()
    error: str = ""


class SendEnded(Struct, frozen=True, tag=True):
    """(terminal) An outgoing layer stream: everything was received, or `error` says why not."""

    stream_id: str
    num_bytes: int = 0
    seconds: float = 0.0
    error: str = ""


class ReceiveEnded(Struct, frozen=True, tag=True):
    """(terminal) An incoming layer stream. `corrupt` are the indices (into the request's block
    table) of blocks of which a slice was wrong or is missing; all others are complete and verified,
    also where there is an `error`.
    """

    stream_id: str
    corrupt: tuple[int, ...] = ()
    num_bytes: int = 0
    seconds: float = 0.0
    error: str = ""


class StoreEnded(Struct, frozen=True, tag=True):
    """(terminal) Blocks written to the SSD: the first `num_blocks` are safely there. `hung`: the
    disk has not answered, and may still write to the slots until `StoreReturned`."""

    store_id: str
    num_blocks: int
    num_bytes: int = 0
    seconds: float = 0.0
    error: str = ""
    hung: bool = False


class LoadEnded(Struct, frozen=True, tag=True):
    """(terminal) Blocks read from the SSD: the first `num_blocks` arrived, their checksums hold.
    `hung`: the disk has not answered, and may still write to the other blocks until
    `LoadReturned`."""

    load_id: str
    num_blocks: int
    corrupt_slices: int = 0
    num_bytes: int = 0
    seconds: float = 0.0
    error: str = ""
    hung: bool = False


class LoadProgress(Struct, frozen=True, tag=True):
    """A load that was asked to come layer by layer is being read: of all of its blocks the first
    `num_layers` layers have arrived and hold, `seconds` after it began."""

    load_id: str
    num_layers: int = 0
    seconds: float = 0.0


class LoadReturned(Struct, frozen=True, tag=True):
    """The disk has let go of what a hung load held."""

    load_id: str


class StoreReturned(Struct, frozen=True, tag=True):
    """The disk has let go of what a hung store held."""

    store_id: str


class TierPaused(Struct, frozen=True, tag=True):
    """The SSD does not answer: nothing more is asked of it until `TierResumed`. What is on it is
    believed to be there still."""

    error: str


class TierResumed(Struct, frozen=True, tag=True):
    """It answers again."""


class LookUpEnded(Struct, frozen=True, tag=True):
    """(terminal) The store that others use too was asked: it holds the first `num_blocks`."""

    lookup_id: str
    num_blocks: int
    error: str = ""


class StoreLost(Struct, frozen=True, tag=True):
    """The SSD tier is gone for good (a disk error, a folder that vanished). Stores and loads under
    way still end, each by its own event."""

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
