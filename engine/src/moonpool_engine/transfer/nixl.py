"""NIXL transport: the reader's NIXL agent reads slices from the sender's arena into its own, by
RDMA where the network supports it, or else by another way that UCX finds.

Only positions and checksums are sent over the connection. As in shared memory, the sender keeps a
slice unchanged until the reader has reported that it is done. The two sides exchange the metadata
of their agents over the connection after they have authenticated each other.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from moonpool.types import MALFORMED, InstanceId
from moonpool_engine.transfer.arena import Arena
from moonpool_engine.transfer.connection import FrameConnection
from moonpool_engine.transfer.errors import ProtocolError
from moonpool_engine.transfer.frame_socket import FrameSocket
from moonpool_engine.transfer.nixl_agent import NixlAgent, NixlChannel
from moonpool_engine.transfer.nixl_agent_process import MAX_METADATA_BYTES, AgentMetadata, Span
from moonpool_engine.transfer.reshard import ShardView
from moonpool_engine.transfer.slice_receiver import SliceReceiver
from moonpool_engine.transfer.wire import Message, ReadRenewed, SliceOffer, Slices, unpack_offers

_METADATA = msgspec.msgpack.Decoder(AgentMetadata)


class NixlConnection(FrameConnection):
    """See `connection.Connection`."""

    transport = "nixl"
    defers_checksums = False

    def __init__(
        self, frames: FrameSocket, peer: InstanceId, channel: NixlChannel, peer_bytes: int
    ) -> None:
        """`peer_bytes`: size of the peer's arena in bytes."""
        super().__init__(frames, peer)
        self._channel = channel
        self._peer_bytes = peer_bytes

    @property
    def closed(self) -> bool:
        return super().closed or self._channel.broken

    def receive(self, deadline_s: float) -> Message:
        message = super().receive(deadline_s)
        if not isinstance(message, ReadRenewed):
            self._channel.expose(False)
        return message

    def send_slices(
        self, offer: Slices, arena: Arena, deadline_s: float, target_view: ShardView | None = None
    ) -> None:
        self._channel.expose(True)
        self._frames.send(offer, deadline_s)

    def receive_slices(self, offers: bytes, receiver: SliceReceiver, deadline_s: float) -> int:
        unpacked = unpack_offers(offers)
        offsets = receiver.offsets(unpacked)
        spans = self._spans(unpacked, receiver, offsets)
        self._channel.read(spans, deadline_s, self._frames.fileno())
        return receiver.verify(unpacked, offsets)

    def close(self) -> None:
        super().close()
        self._channel.close()

    def _spans(
        self, offers: Sequence[SliceOffer], receiver: SliceReceiver, offsets: Sequence[int]
    ) -> list[Span]:
        """Returns the spans to read; slices adjacent on both sides become one. Raises ProtocolError
        for a slice outside the peer's arena."""
        plan, layers = receiver.reshard_plan, receiver.num_layers
        size = receiver.slice_bytes if plan is None else plan.source_bytes
        block_bytes = size * layers
        spans: list[Span] = []
        for (_, layer, block_id, _), offset in zip(offers, offsets, strict=True):
            if not (0 <= (block_id + 1) * block_bytes <= self._peer_bytes and 0 <= layer < layers):
                raise ProtocolError(
                    f"the peer offered block {block_id} layer {layer}, which it lacks"
                )
            source = block_id * block_bytes + layer * size
            if plan is not None:
                spans += [(source + at, offset + to, n) for at, to, n in plan.pieces]
                continue
            if spans:
                start, target, length = spans[-1]
                if source == start + length and offset == target + length:
                    spans[-1] = (start, target, length + size)
                    continue
            spans.append((source, offset, size))
        return spans


def exchange_metadata(
    frames: FrameSocket, peer: InstanceId, agent: NixlAgent, deadline_s: float
) -> NixlConnection:
    """Sends our agent's metadata, receives the peer's and connects to it. Raises
    TransportError."""
    frames.send_frame(msgspec.msgpack.encode(agent.metadata(deadline_s)), deadline_s)
    body = frames.receive_frame(MAX_METADATA_BYTES + 1024, deadline_s)
    try:
        metadata = _METADATA.decode(body)
    except MALFORMED as error:
        raise ProtocolError(f"malformed NIXL metadata: {error}") from error
    channel = agent.open_channel(metadata, deadline_s)
    return NixlConnection(frames, peer, channel, metadata.num_bytes)
