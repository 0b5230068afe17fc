"""The messages between the clients and the pool of a host, over a unix socket.

Clients are the processes of vLLM (or of another engine), and the process by which a head sees that
vLLM. A *group* is one model in one layout: all whose blocks are interchangeable. Each rank of a
vLLM that is divided among processes (by tensors or by layers) keeps its shares of the blocks in a
separate *space*. A block is found if all spaces of its group have it.

Bodies are msgpack in frames of 4 bytes of length. Blocks never pass the socket: clients map the
memory of the spaces, and copy. Every copy is verified by the checksums that come with it.

A model with several kinds of KVCache has a space for each kind of each process. If layers read only
a window of the newest tokens, their space needs no more than the window's blocks for a hit.
"""

from __future__ import annotations

import os
import socket
import struct
from asyncio import StreamReader
from typing import Annotated, TypeVar

import msgspec

from moonpool.framing import Framing
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.messages import BlocksChanged, BlocksSnapshot
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.types import BlockKey, Struct

PROTOCOL = 2
MAX_FRAME_BYTES = 64 << 20
MAX_KEYS = 1 << 17
MAX_RANKS = 1024

_Name = Annotated[str, msgspec.Meta(max_length=500)]
_Group = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
_Key = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_Keys = Annotated[tuple[_Key, ...], msgspec.Meta(max_length=MAX_KEYS)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=600.0)]


# Messages of a client


class AttachRank(Struct, frozen=True, tag=True):
    """A rank's process requests the memory of its space. The pool answers with `RankAttached` or
    `PoolRefused`."""

    protocol: int
    group: _Group
    model: _Name
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MAX_RANKS)]
    num_ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    layout: BlockLayout
    """Nominal but for its sizes: `num_layers` slices of `slice_bytes` in a block."""
    window_blocks: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    """How many blocks before its end a prefix needs in this space; 0 means all."""


class JoinPool(Struct, frozen=True, tag=True):
    """A process that holds no rank asks to use the pool: to find, watch and fetch blocks. The pool
    answers with `PoolJoinAccepted` or `PoolRefused`."""

    protocol: int


class Find(Struct, frozen=True, tag=True):
    """Asks to hold the longest prefix of `keys` for `owner`, until `Release`, and to bring its
    blocks on the SSD to DRAM first. Answered with `Found`, after a `Waiting` if that takes time. If
    blocks are missing, the find waits up to `wait_s` for blocks that others are about to store.
    `places`: whether the finder copies the blocks itself."""

    owner: _Name
    group: _Group
    keys: _Keys
    places: bool = True
    wait_s: _Seconds = 0.0


class Release(Struct, frozen=True, tag=True):
    """Ends the holds of a `Find`, or the `Find`."""

    owner: _Name
    group: _Group


class Reserve(Struct, frozen=True, tag=True):
    """The rank wants to store these blocks in its space. The pool answers with `Reserved`."""

    number: _Count
    keys: _Keys
    first_depth: _Count = 0
    """The index of the first block in its prompt."""


class Commit(Struct, frozen=True, tag=True):
    """The reserved blocks are full; `checksums` are those of all their slices (u64, little-endian),
    in the order of the blocks that `Reserved` named. Without checksums, the reservation ends."""

    number: _Count
    checksums: bytes


class Damaged(Struct, frozen=True, tag=True):
    """Tells that these blocks of the rank's space differ from their checksums."""

    keys: _Keys


class Watch(Struct, frozen=True, tag=True):
    """Asks for all keys of a group, and from then on for their changes: `GroupBlocks`."""

    group: _Group


class FetchToPool(Struct, frozen=True, tag=True):
    """Copies blocks from the pool of another host, one address for each rank. The pool answers with
    `Fetched`."""

    number: _Count
    group: _Group
    sources: Annotated[tuple[PeerAddress, ...], msgspec.Meta(min_length=1, max_length=MAX_RANKS)]
    keys: _Keys
    timeout_s: _Seconds


class Describe(Struct, frozen=True, tag=True):
    """Asks for `PoolState`."""


# Messages of the pool


class PoolRefused(Struct, frozen=True, tag=True):
    """The pool does not serve this client; one line says why. The connection ends."""

    error: str


class RankAttached(Struct, frozen=True, tag=True):
    """The space's memory: `num_blocks` blocks of the layout, in the file at `path`."""

    path: str
    num_blocks: int


class PoolJoinAccepted(Struct, frozen=True, tag=True):
    """`version` is the version of the pool, for the log."""

    version: str


class RankBlocks(Struct, frozen=True):
    """Where the blocks lie in one rank's space (i64), and the checksums of their slices (u64). In a
    space with a window, these are only the last blocks of the prefix."""

    block_ids: bytes
    checksums: bytes


class Found(Struct, frozen=True, tag=True):
    """The first `num_blocks` keys are in DRAM and held; `num_loaded` of their blocks came from the
    SSD. `ranks` has an entry for each rank, if the finder asked for places."""

    owner: str
    num_blocks: int
    num_loaded: int = 0
    ranks: tuple[RankBlocks, ...] = ()


class Waiting(Struct, frozen=True, tag=True):
    """The search of a `Find` waits for the SSD, or for other clients. The message is sent at once,
    and ten times a second until the find ends."""

    owner: str


class Reserved(Struct, frozen=True, tag=True):
    """The place of each key (i64); -1 if the space has the block already, or has no room."""

    number: int
    block_ids: bytes


class GroupBlocks(Struct, frozen=True, tag=True):
    """The blocks that the group of ranks holds, in the form of an instance's report."""

    group: bytes
    report: BlocksChanged | BlocksSnapshot


class Fetched(Struct, frozen=True, tag=True):
    """The first `num_blocks` keys of a `FetchToPool` are here now. `error`: why the others are not,
    or ""."""

    number: int
    num_blocks: int
    num_bytes: int = 0
    seconds: float = 0.0
    error: str = ""


class SpaceState(Struct, frozen=True):
    """Gauges and counters of one rank's space."""

    rank: int
    num_blocks: int
    held: int
    cached: int
    block_bytes: int
    address: PeerAddress
    ssd_blocks: int = 0
    ssd_cached: int = 0
    ssd_error: str = ""
    ssd_read_bytes_per_s: float = 0.0
    owners: dict[str, int] = msgspec.field(default_factory=dict)
    counters: dict[str, float] = msgspec.field(default_factory=dict)


class GroupState(Struct, frozen=True):
    """`is_whole`: whether all its ranks have attached, so that blocks can be found."""

    group: bytes
    model: str
    block_tokens: int
    num_ranks: int
    num_clients: int
    is_whole: bool
    spaces: tuple[SpaceState, ...]


class PoolState(Struct, frozen=True, tag=True):
    """All groups of the pool, the most recently used one last."""

    version: str
    pid: int
    dram_bytes: int
    groups: tuple[GroupState, ...]


ClientMessage = (
    AttachRank
    | JoinPool
    | Find
    | Release
    | Reserve
    | Commit
    | Damaged
    | Watch
    | FetchToPool
    | Describe
)
PoolMessage = (
    PoolRefused
    | RankAttached
    | PoolJoinAccepted
    | Found
    | Waiting
    | Reserved
    | GroupBlocks
    | Fetched
    | PoolState
)
TO_POOL = msgspec.msgpack.Decoder(ClientMessage)
FROM_POOL = msgspec.msgpack.Decoder(PoolMessage)


def keys_of(keys: tuple[bytes, ...]) -> tuple[BlockKey, ...]:
    """Returns the same keys in the form that the pool's tables use."""
    return tuple(map(BlockKey, keys))


FRAMES = Framing(">", MAX_FRAME_BYTES)
_PEER = struct.Struct("3i")  # process id, user id, group id
_T = TypeVar("_T")


def framed(message: ClientMessage | PoolMessage) -> bytes:
    """The bytes of a message on the socket."""
    return FRAMES.framed(msgspec.msgpack.encode(message))


async def read_message(reader: StreamReader, decoder: msgspec.msgpack.Decoder[_T]) -> _T:
    """Reads one message. Raises ValueError, the errors of the reader and those of the decoder."""
    return decoder.decode(await FRAMES.read_from(reader))


def is_own_user(sock: socket.socket) -> bool:
    """Whether the kernel says that the process at the other end belongs to the user of this
    process. A stranger could open a socket where the pool is looked for, and would get what users
    wrote."""
    credentials = getattr(socket, "SO_PEERCRED", None)
    if credentials is None:  # only Linux systems have a pool
        return False
    _, user, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, credentials, _PEER.size))
    return bool(user == os.geteuid())
