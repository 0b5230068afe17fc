"""Messages between messengers: msgpack structs, one per frame, bounded in size and validated.

After the handshake (`auth`) a connection serves one operation after the other:

    fetch:   client ReadBlocks -> server ReadGranted, Slices ... up to the one that is `last`
             -> client ReadRenewed ..., ReadReleased
    stream:  client OpenStream -> server StreamExpected -> client Slices ..., SlicesEnd
             -> server StreamReceived

Either side may answer Refused instead. A server may answer Redirect: the client then starts the
operation again with the one peer it names, or with several peers that store a share each. An
operation may be redirected once. An operation that fails closes its connection, so that its late
messages cannot be mistaken for those of the next operation. Over TCP the bytes of the slices follow
their Slices frame. In shared memory, the reader copies slices from the sender's arena.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Annotated, cast

import msgspec

from moonpool.protocol.transfer_events import PeerAddress
from moonpool.types import BlockKey, Struct
from moonpool_engine.transfer.reshard import ShardView

MAX_FRAME_BYTES = 1 << 20
MAX_SLICES_PER_FRAME = 256
MAX_REDIRECT_ADDRESSES = 64
MAX_DEFERRED_CHECKSUMS = 1 << 16
"""Checksums in one StreamReceived, half a frame. The sender hashes slices beyond this number when
it next sends them."""

_Id = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
_Checksums = Annotated[bytes, msgspec.Meta(max_length=8 * MAX_DEFERRED_CHECKSUMS)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=100_000)]


SliceOffer = tuple[int, int, int, int]
"""One slice: index and layer, which give its place at the receiver; its block id at the sender; its
xxh3_64. In a stream within a host the checksum is 0 if the sender does not know it (see
`arena.DeferredChecksums`)."""
OFFER = struct.Struct("<qqqQ")


class Slices(Struct, frozen=True, tag=True):
    """Offers slices to the receiver. `offers` are packed with OFFER; copiers read them packed."""

    offers: Annotated[bytes, msgspec.Meta(max_length=MAX_SLICES_PER_FRAME * OFFER.size)]
    last: bool = False


class SlicesEnd(Struct, frozen=True, tag=True):
    """No more slices follow."""


class ReadBlocks(Struct, frozen=True, tag=True):
    """Requests blocks by key, from layer `first_layer` on, in layer-major order. `shard_view`: the
    part of each slice that the reader's arena stores."""

    keys: tuple[BlockKey, ...]
    timeout_s: _Seconds
    first_layer: _Count = 0
    shard_view: ShardView | None = msgspec.field(default=None, name="cut")


class ReadGranted(Struct, frozen=True, tag=True):
    """The first `num_blocks` of the keys follow. The granted blocks stay unchanged for `lease_s`
    after each sign of life from the reader. `absent`: positions of the blocks that other peers
    store. `shard_view`: the part of each slice that the source's arena stores."""

    num_blocks: _Count
    lease_s: _Seconds
    absent: tuple[_Count, ...] = ()
    shard_view: ShardView | None = msgspec.field(default=None, name="cut")


class ReadRenewed(Struct, frozen=True, tag=True):
    """The reader is alive and still reads: renews the lease."""


class ReadReleased(Struct, frozen=True, tag=True):
    """The reader no longer needs the blocks."""

    corrupt_slices: _Count


class OpenStream(Struct, frozen=True, tag=True):
    """Starts a stream of slices to the receiver."""

    stream_id: _Id
    timeout_s: _Seconds


class StreamExpected(Struct, frozen=True, tag=True):
    """The receiver expects slices of indices first_index ... first_index + num_indices - 1, except
    `absent`, which other peers receive. `shard_view`: the part of each slice that the receiver
    stores."""

    first_index: _Count
    num_indices: _Count
    absent: tuple[_Count, ...] = ()
    shard_view: ShardView | None = msgspec.field(default=None, name="cut")


class StreamReceived(Struct, frozen=True, tag=True):
    """Ends a stream. `corrupt`: indices of blocks of which a slice was wrong or is missing.
    `checksums`: little-endian xxh3_64 of the first MAX_DEFERRED_CHECKSUMS slices that were offered
    without one."""

    corrupt: tuple[_Count, ...]
    checksums: _Checksums = msgspec.field(default=b"", name="sums")


class Redirect(Struct, frozen=True, tag=True):
    """The blocks are not in this instance's own memory but at these addresses. With `others`, each
    of the peers stores a share."""

    address: PeerAddress
    others: Annotated[
        tuple[PeerAddress, ...], msgspec.Meta(max_length=MAX_REDIRECT_ADDRESSES - 1)
    ] = ()

    @property
    def addresses(self) -> tuple[PeerAddress, ...]:
        return (self.address, *self.others)


class Refused(Struct, frozen=True, tag=True):
    """The operation is refused, with the reason."""

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
    | Redirect
    | Refused
)


class Codec:
    """Encodes and decodes messages. Each connection has one codec, because encoders are not shared
    between threads."""

    def __init__(self) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)

    def encode(self, message: Message) -> bytes:
        return self._encoder.encode(message)

    def decode(self, body: bytes) -> Message:
        """Raises msgspec.DecodeError if the body is not one well-formed message."""
        return self._decoder.decode(body)


def pack_offers(offers: Iterable[SliceOffer]) -> bytes:
    """Packs offers with OFFER, one after another."""
    return b"".join([OFFER.pack(*offer) for offer in offers])


def unpack_offers(packed: bytes) -> list[SliceOffer]:
    """Raises struct.error if `packed` is not a whole number of offers."""
    return cast(list[SliceOffer], list(OFFER.iter_unpack(packed)))
