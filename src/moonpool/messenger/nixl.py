"""Slices by NIXL: only place and checksum travel over the connection; the reader's courier pulls
the bytes from the sender's arena straight to their place in ours (by RDMA where there is such a
network, else by what UCX has).

It is what shared memory is within a host: the sender keeps a slice unchanged until the reader has
said that it is done. Cards are exchanged over the connection once both ends have proven themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moonpool.messenger.arena import Arena
from moonpool.messenger.courier import Courier, Lane
from moonpool.messenger.courier_child import MAX_METADATA_BYTES, Card
from moonpool.messenger.cut import Cut
from moonpool.messenger.landing_table import LandingTable
from moonpool.messenger.transport import FrameSocket, ProtocolError
from moonpool.messenger.wire import Message, ReadRenewed, SliceOffer, Slices, unpack_offers
from moonpool.types import InstanceId

_CARD = msgspec.msgpack.Decoder(Card)


class NixlConnection:
    """See `transport.Connection`."""

    transport = "nixl"
    takes_unnamed = False

    def __init__(self, frames: FrameSocket, peer: InstanceId, lane: Lane, num_bytes: int) -> None:
        frames.read_ahead()
        self.peer = peer
        self._frames = frames
        self._lane = lane
        self._peer_bytes = num_bytes
        self.send = frames.send
        self.hold = frames.hold
        self.flush = frames.flush
        self.fileno = frames.fileno
        self.has_input = frames.has_input
        self.hung_up = frames.hung_up
        self.interrupt = frames.interrupt

    @property
    def closed(self) -> bool:
        return self._frames.closed or self._lane.broken

    @property
    def holds(self) -> bool:
        return self._frames.holds

    def receive(self, deadline_s: float) -> Message:
        message = self._frames.receive(deadline_s)
        if not isinstance(message, ReadRenewed):
            self._lane.lend(False)
        return message

    def offer(self, offer: Slices, arena: Arena, deadline_s: float, cut: Cut | None = None) -> None:
        self._lane.lend(True)
        self._frames.send(offer, deadline_s)

    def take(self, offers: bytes, table: LandingTable, deadline_s: float) -> int:
        unpacked = unpack_offers(offers)
        places = table.places(unpacked)
        spans = self._spans(unpacked, table, places)
        self._lane.pull(spans, deadline_s, self._frames.fileno())
        return table.verify(unpacked, places)

    def close(self) -> None:
        self._frames.close()
        self._lane.close()

    def _spans(
        self, offers: Sequence[SliceOffer], table: LandingTable, places: Sequence[int]
    ) -> list[tuple[int, int, int]]:
        """Neighbours on both sides are pulled as one. ProtocolError for what the peer lacks."""
        crossing, layers = table.passage, table.num_layers
        size = table.arena.slice_bytes if crossing is None else crossing.source_bytes
        block_bytes = size * layers
        spans: list[tuple[int, int, int]] = []
        for (_, layer, block_id, _), place in zip(offers, places, strict=True):
            if not (0 <= (block_id + 1) * block_bytes <= self._peer_bytes and 0 <= layer < layers):
                raise ProtocolError(
                    f"the peer offered block {block_id} layer {layer}, which it lacks"
                )
            source = block_id * block_bytes + layer * size
            if crossing is not None:
                spans += [(source + at, place + to, n) for at, to, n in crossing.pieces]
                continue
            if spans:
                start, target, length = spans[-1]
                if source == start + length and place == target + length:
                    spans[-1] = (start, target, length + size)
                    continue
            spans.append((source, place, size))
        return spans


def swap_cards(
    frames: FrameSocket, peer: InstanceId, courier: Courier, deadline_s: float
) -> NixlConnection:
    """Hands our courier's card to the peer and takes its own. Raises TransportError."""
    frames.send_frame(msgspec.msgpack.encode(courier.card(deadline_s)), deadline_s)
    body = frames.receive_frame(MAX_METADATA_BYTES + 1024, deadline_s)
    try:
        card = _CARD.decode(body)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"malformed card: {error}") from error
    lane = courier.lane(card, deadline_s)
    return NixlConnection(frames, peer, lane, card.num_bytes)
