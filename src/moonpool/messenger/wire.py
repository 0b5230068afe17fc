"""What messengers say to each other: msgpack structs, one per frame, bounded in size and checked.

After the handshake (`auth`) a connection serves one operation after the other:

    fetch:   client ReadBlocks -> server ReadGranted, Slices ... up to the one that is `last`
             -> client ReadRenewed ..., ReadReleased
    stream:  client OpenStream -> server StreamExpected -> client Slices ..., SlicesEnd
             -> server StreamReceived

Either side may answer Refused instead, and a server Elsewhere: the same operation is then begun
anew with the peer it names, once, or with several, each of which has a share. An operation that did
not come to its end closes the connection: what might still arrive of it must not be taken for the
next one's. On tcp the bytes of the slices follow their Slices frame; in shared memory the reader
copies them from the arena of the other side.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Annotated, cast

import msgspec

from moonpool.kvcache.transfers import PeerAddress
from moonpool.messenger.cut import Cut
from moonpool.types import BlockKey, Struct

MAX_FRAME_BYTES = 1 << 20
MAX_SLICES_PER_FRAME = 256
MAX_KEEPERS = 64  # of one instance's blocks
MAX_TOLD_SUMS = 1 << 16  # half a frame; what goes beyond is hashed by its sender, next time

_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
_Sums = Annotated[bytes, msgspec.Meta(max_length=8 * MAX_TOLD_SUMS)]
"""Little-endian xxh3_64, one after the other: of the first MAX_TOLD_SUMS slices that were offered
without theirs."""
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=100_000)]


SliceOffer = tuple[int, int, int, int]
"""One slice: index and layer, its place in the receiver's table; the block where the sender keeps
it; its xxh3_64. In a stream within a host 0 if it is not known: who copies the slice sums it, and
tells."""
OFFER = struct.Struct("<qqqQ")


class Slices(Struct, frozen=True, tag=True):
    """`offers` are packed, OFFER each: what moves them reads them as they are."""

    offers: Annotated[bytes, msgspec.Meta(max_length=MAX_SLICES_PER_FRAME * OFFER.size)]
    last: bool = False


class SlicesEnd(Struct, frozen=True, tag=True):
    """No more slices follow."""


class ReadBlocks(Struct, frozen=True, tag=True):
    """Of these blocks, the layers from `first_layer` on are wanted: one layer of all of them after
    the other. `cut`: what the reader keeps of slices."""

    keys: tuple[BlockKey, ...]
    timeout_s: _Seconds
    first_layer: _Count = 0
    cut: Cut | None = None


class ReadGranted(Struct, frozen=True, tag=True):
    """The first `num_blocks` of the keys follow. They stay as they are for `lease_s` after each
    sign of life of the reader. `absent`: those of them that others have; `cut`: what is kept
    here of slices."""

    num_blocks: _Count
    lease_s: _Seconds
    absent: tuple[_Count, ...] = ()
    cut: Cut | None = None


class ReadRenewed(Struct, frozen=True, tag=True):
    """The reader is still at it."""


class ReadReleased(Struct, frozen=True, tag=True):
    """The reader needs the blocks no longer."""

    corrupt_slices: _Count


class OpenStream(Struct, frozen=True, tag=True):
    stream_id: _Id
    timeout_s: _Seconds


class StreamExpected(Struct, frozen=True, tag=True):
    """Slices of the indices first_index ... first_index + num_indices - 1 are wanted, but of
    `absent`, which others receive; of each slice what `cut` says."""

    first_index: _Count
    num_indices: _Count
    absent: tuple[_Count, ...] = ()
    cut: Cut | None = None


class StreamReceived(Struct, frozen=True, tag=True):
    """`corrupt` are the indices of which a slice was wrong or is missing."""

    corrupt: tuple[_Count, ...]
    sums: _Sums = b""


class Elsewhere(Struct, frozen=True, tag=True):
    """The blocks are not in this instance's own memory: whoever keeps them listens there. With
    `others`, each of them keeps a share."""

    address: PeerAddress
    others: Annotated[tuple[PeerAddress, ...], msgspec.Meta(max_length=MAX_KEEPERS - 1)] = ()

    @property
    def addresses(self) -> tuple[PeerAddress, ...]:
        return (self.address, *self.others)


class Refused(Struct, frozen=True, tag=True):
    reason: Annotated[str, msgspec.Meta(max_length=500)]


Message = (
    Slices
    | SlicesEnd
    | ReadBlocks
    | ReadGranted
    | ReadRenewed
    | ReadReleased
    | OpenStream
    | StreamExpected
    | StreamReceived
    | Elsewhere
    | Refused
)


class Codec:
    """Encodes and decodes messages. One per connection: encoders are not shared between threads."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)

    def encode(self, message: Message) -> bytes:
        return self._encoder.encode(message)

    def decode(self, body: bytes) -> Message:
        """Raises msgspec.DecodeError if the body is not one well-formed message."""
        return self._decoder.decode(body)


def pack_offers(offers: Iterable[SliceOffer]) -> bytes:
    return b"".join([OFFER.pack(*offer) for offer in offers])


def unpack_offers(packed: bytes) -> list[SliceOffer]:
    """struct.error if these are not whole offers."""
    return cast(list[SliceOffer], list(OFFER.iter_unpack(packed)))
