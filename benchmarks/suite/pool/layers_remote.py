"""The other process of `bench layers`: a peer that serves the blocks of a prefix, and receives
stored blocks."""

from __future__ import annotations

from multiprocessing.connection import Connection as Pipe

import numpy as np

from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.transfer_events import MessengerEvent, PeerAddress, ReadRequested
from moonpool.types import BlockId, InstanceId, Struct
from moonpool_engine.engine.native.slices import open_slices
from moonpool_engine.transfer.arena import Arena
from moonpool_engine.transfer.local_peer import LocalPeer
from moonpool_engine.transfer.messenger import Messenger, TransferLimits
from moonpool_engine.transfer.slice_copier import fastest_copier

SECRET = b"benchmark"
TIMEOUT_S = 60.0


class ExpectTransfer(Struct, frozen=True):
    """Expect a stream of this many blocks."""

    stream_id: str
    num_blocks: int


def fill_with_floats(arena: Arena) -> None:
    """Fills with finite values: the results do not matter, but must not be NaN."""
    values = np.random.default_rng(0).standard_normal(1 << 16, np.float32) * 0.1
    if arena.layout.dtype == "bfloat16":
        raw = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    else:
        raw = values.tobytes()
    for start in range(0, arena.num_bytes, len(raw)):
        part = arena.buffer[start : start + len(raw)]
        part[:] = raw[: len(part)]


def run_far(pipe: Pipe, layout: BlockLayout, num_blocks: int, shared_memory: bool) -> None:
    """Serves the first blocks of its arena to every reader until the pipe says to end."""
    arena = Arena(layout, num_blocks)
    fill_with_floats(arena)

    def post(event: MessengerEvent) -> None:
        if isinstance(event, ReadRequested):
            messenger.grant(event.read_id, [BlockId(i) for i in range(len(event.keys))])

    messenger = Messenger(
        arena,
        layout,
        LocalPeer(InstanceId("far"), SECRET, use_shared_memory=shared_memory),
        post,
        fastest_copier(arena, open_slices()),
        limits=TransferLimits(lease_s=TIMEOUT_S),
    )
    address: PeerAddress = messenger.start()
    pipe.send(address)
    while (take := pipe.recv()) is not None:
        assert isinstance(take, ExpectTransfer)
        blocks = [BlockId(i) for i in range(take.num_blocks)]
        messenger.expect(take.stream_id, blocks, 0, TIMEOUT_S)
        pipe.send("expecting")
    messenger.close()
