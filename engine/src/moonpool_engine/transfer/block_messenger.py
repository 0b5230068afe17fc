"""The interface through which an instance moves its blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from moonpool.protocol.transfer_events import PeerAddress
from moonpool.types import BlockId, BlockKey
from moonpool_engine.transfer.context import SliceRef
from moonpool_engine.transfer.counters import TransferCounts
from moonpool_engine.transfer.gate import LayerGate


class BlockMessenger(Protocol):
    """Moves the blocks of an instance: a `Messenger` moves blocks of its own arena, a
    `RemoteAttentionMessenger` those at its attention workers. All methods return at once; each
    operation that they begin ends with an event."""

    def fetch(
        self,
        fetch_id: str,
        source: PeerAddress,
        keys: Sequence[BlockKey],
        block_ids: Sequence[BlockId],
        timeout_s: float,
        gate: LayerGate | None = None,
    ) -> None: ...

    def grant(self, read_id: str, block_ids: Sequence[BlockId]) -> None: ...

    def open_stream(self, stream_id: str, target: PeerAddress, timeout_s: float) -> None: ...

    def send(self, stream_id: str, slices: Sequence[SliceRef]) -> None: ...

    def finish_stream(self, stream_id: str) -> None: ...

    def abort_stream(self, stream_id: str) -> None: ...

    def expect(
        self, stream_id: str, block_ids: Sequence[BlockId], first_index: int, timeout_s: float
    ) -> None: ...

    def cancel(self, stream_id: str) -> None: ...

    def forget_checksums(
        self, block_ids: Sequence[BlockId], first_token: int, end_token: int
    ) -> None:
        """Called before a step writes tokens `first_token` to `end_token` - 1 of the sequence whose
        block table is `block_ids`."""
        ...

    def counts(self) -> TransferCounts: ...

    def close(self) -> None: ...
