"""What a model worker tells its attention workers beside the steps, and what they tell back.

    model worker                                attention worker
      | -- Attach: layout, shape, room ----------> |
      | <-- Attached (or Refused, one line) ------ |
      | -- Expect, Fetch, Grant ... -------------> |  its messenger does it
      | <-- messenger events --------------------- |
      | -- Named: what complete blocks hold -----> |  so that the next model worker can go on

Block numbers are the attention worker's own; -1 stands for a block that another one has. `epoch`
orders what comes over this connection with the plans, which come by another: a block is not named
after what it held before a later write.
"""

from __future__ import annotations

import msgspec

from moonpool.attention.partition import HeadRange
from moonpool.kvcache.layout import BlockLayout
from moonpool.kvcache.transfers import (
    FetchEnded,
    PeerAddress,
    ReadEnded,
    ReadRequested,
    ReceiveEnded,
    SendEnded,
)
from moonpool.types import BlockId, BlockKey, InstanceId, Struct

SERVICE = "attention"
MAX_FRAME_BYTES = 64 << 20


class Attach(Struct, frozen=True, tag=True):
    """The first word on a control connection. `layout` and `num_heads` are the model's; with
    `kv_heads`, this worker has only those of all blocks. `token` opens the connection for the
    steps."""

    owner: InstanceId
    layout: BlockLayout
    num_heads: int
    kv_heads: HeadRange | None
    scale: float
    num_blocks: int  # 0: as many as the memory's share allows, up to a pool's usual size
    threads: int
    token: str
    ring_bytes: int


class Attached(Struct, frozen=True, tag=True):
    """`named`: full blocks that are still here from an earlier owner, the longest unused first."""

    address: PeerAddress
    num_blocks: int
    named: tuple[tuple[BlockId, BlockKey], ...]


class Steps(Struct, frozen=True, tag=True):
    """The first word on the connection for the steps. With `rings`, these follow; who waits at one
    looks for `spin_s` before it sleeps."""

    token: str
    rings: bool
    spin_s: float


class Refused(Struct, frozen=True, tag=True):
    reason: str


class Expect(Struct, frozen=True, tag=True):
    stream_id: str
    block_ids: tuple[BlockId, ...]
    first_index: int
    timeout_s: float
    epoch: int


class Cancel(Struct, frozen=True, tag=True):
    stream_id: str


class Fetch(Struct, frozen=True, tag=True):
    fetch_id: str
    source: PeerAddress
    keys: tuple[BlockKey, ...]
    block_ids: tuple[BlockId, ...]
    timeout_s: float
    epoch: int


class Grant(Struct, frozen=True, tag=True):
    read_id: str
    block_ids: tuple[BlockId, ...]


class Named(Struct, frozen=True, tag=True):
    blocks: tuple[tuple[BlockId, BlockKey], ...]
    epoch: int


class Received(Struct, frozen=True, tag=True):
    """Gauge: bytes that its messenger received so far, by transport."""

    num_bytes: dict[str, int]


Opening = Attach | Steps
Answer = Attached | Refused
Order = Expect | Cancel | Fetch | Grant | Named
Told = FetchEnded | ReadRequested | ReadEnded | ReceiveEnded | SendEnded | Received

ENCODER = msgspec.msgpack.Encoder()
OPENING = msgspec.msgpack.Decoder(Opening)
ANSWER = msgspec.msgpack.Decoder(Answer)
ORDER = msgspec.msgpack.Decoder(Order)
TOLD = msgspec.msgpack.Decoder(Told)
