"""The messages between a model worker and its attention workers, over two connections.

Control connection (msgpack frames): attaching, blocks, and transfers.

    model worker                                attention worker
      | -- Attach: layout, shape, room ----------> |
      | <-- Attached, or AttentionRefused (why) -- |
      | -- Expect, FetchPrefix, Grant ... -------> |  its messenger performs them
      | <-- messenger events, ReceivedBytes ------ |
      | -- MarkCached: keys of full blocks ------> |  so that the next model worker can reuse them

Step connection (`OpenSteps`, then raw messages), for every step and layer:

    model worker                                    attention worker
      | -- PLAN: rows and blocks of its share --------> |
      | -- per layer: Q, then KEYS_VALUES ------------> |  attends to old tokens, stores, attends
      | <-- per layer: ATTENDED ----------------------- |  outputs, and how long they took
      | <-- or FAILED: one line                         |
      | -- ECHO, which returns unchanged -------------> |  (to measure the round trip)

A step message is a header of 16 bytes and a payload. The payloads of layers are the bytes of the
rows; their shapes follow from the plan. Only queries, keys, values and outputs are sent, nothing
else of a model.

Block ids are the attention worker's own; -1 stands for a block of another worker. `epoch` orders
control messages relative to plans, which come over the other connection, so that a block never gets
the key of content that a later write has replaced.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from torch import Tensor

from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.transfer_events import (
    FetchEnded,
    PeerAddress,
    ReadEnded,
    ReadRequested,
    ReceiveEnded,
    SendEnded,
)
from moonpool.types import BlockId, BlockKey, InstanceId, Struct
from moonpool_engine.engine.ops import AttendRule, HeadShape, StepMeta

SERVICE = "attention"
MAX_FRAME_BYTES = 64 << 20


class KvHeadRange(Struct, frozen=True):
    """The `count` KV heads from `first` on, and the query heads that attend to them."""

    first: int
    count: int

    def of_queries(self, q: Tensor, heads: HeadShape) -> Tensor:
        """Returns the query heads of this range: [T, num_heads, head_dim] -> [T, own query heads,
        head_dim]."""
        group = heads.num_heads // heads.num_kv_heads
        own: Tensor = q[:, self.first * group : (self.first + self.count) * group]
        return own

    def of_keys_values(self, kv: Tensor, heads: HeadShape) -> Tensor:
        """kv: K heads, then V heads, [T, 2 * num_kv_heads, head_dim] -> [T, 2 * count,
        head_dim]. With latents there is no V."""
        sides = kv.unflatten(1, (-1, heads.num_kv_heads))
        both: Tensor = sides[:, :, self.first : self.first + self.count]
        return both.contiguous().flatten(1, 2)

    def columns(self, heads: HeadShape) -> slice:
        """The range's columns of the output, [T, num_heads * value_dim]."""
        width = heads.num_heads // heads.num_kv_heads * heads.value_dim
        return slice(self.first * width, (self.first + self.count) * width)


class LayerRule(Struct, frozen=True):
    """How one layer's attention differs from causal softmax: `AttendRule` as a message. `sinks` are
    the bytes of float32, one for each of the model's heads; empty without sinks."""

    window: int = 0
    soft_cap: float = 0.0
    sinks: bytes = b""

    @classmethod
    def of(cls, rule: AttendRule) -> LayerRule:
        sinks = b"" if rule.sinks is None else rule.sinks.float().numpy().tobytes()
        return cls(window=rule.window, soft_cap=rule.soft_cap, sinks=sinks)

    def rule(self, first_head: int, num_heads: int) -> AttendRule:
        """The rule for the query heads from `first_head` on."""
        sinks = None
        if self.sinks:
            every = torch.frombuffer(bytearray(self.sinks), dtype=torch.float32)
            sinks = every[first_head : first_head + num_heads].contiguous()
        return AttendRule(self.window, self.soft_cap, sinks)

    def is_sound(self, num_heads: int) -> bool:
        """Whether its values are possible for a model of this many heads."""
        known = self.window >= 0 and 0 <= self.soft_cap < float("inf")
        return known and len(self.sinks) in (0, 4 * num_heads)


# Control connection


class Attach(Struct, frozen=True, tag=True):
    """The first message of a control connection. `layout` and `num_heads` describe the whole model.
    With `kv_heads`, this worker holds only those heads of all blocks. `latent_dim`: the number of
    elements at the end of a key that are also its value (MLA); 0 means that V is separate. `rules`:
    the rules of each layer, or none. `token` authorises the step connection."""

    owner: InstanceId
    layout: BlockLayout
    num_heads: int
    kv_heads: KvHeadRange | None
    scale: float
    latent_dim: int
    rules: tuple[LayerRule, ...]
    num_blocks: int  # 0 means as many as its share of memory allows, up to a pool's usual size
    threads: int
    token: str
    ring_bytes: int


class Attached(Struct, frozen=True, tag=True):
    """`cached`: full blocks that an earlier owner left, in the order in which it named them."""

    address: PeerAddress
    num_blocks: int
    cached: tuple[tuple[BlockId, BlockKey], ...]


class AttentionRefused(Struct, frozen=True, tag=True):
    """The worker cannot serve the owner; `reason` is one line."""

    reason: str


class Expect(Struct, frozen=True, tag=True):
    """See `Messenger.expect`."""

    stream_id: str
    block_ids: tuple[BlockId, ...]
    first_index: int
    timeout_s: float
    epoch: int


class Cancel(Struct, frozen=True, tag=True):
    """See `Messenger.cancel`."""

    stream_id: str


class FetchPrefix(Struct, frozen=True, tag=True):
    """See `Messenger.fetch`."""

    fetch_id: str
    source: PeerAddress
    keys: tuple[BlockKey, ...]
    block_ids: tuple[BlockId, ...]
    timeout_s: float
    epoch: int


class Grant(Struct, frozen=True, tag=True):
    """See `Messenger.grant`."""

    read_id: str
    block_ids: tuple[BlockId, ...]


class MarkCached(Struct, frozen=True, tag=True):
    """Tells that these blocks are full and have these keys. The message is ignored for blocks
    written after `epoch`."""

    blocks: tuple[tuple[BlockId, BlockKey], ...]
    epoch: int


class ReceivedBytes(Struct, frozen=True, tag=True):
    """Gauge: bytes that the worker's messenger has received, by transport."""

    num_bytes: dict[str, int]


class OpenSteps(Struct, frozen=True, tag=True):
    """The first message of a step connection. With `rings`, shared-memory rings follow; a waiting
    side polls its ring for `spin_s` before it sleeps."""

    token: str
    rings: bool
    spin_s: float


Opening = Attach | OpenSteps
AttachReply = Attached | AttentionRefused
AttentionCommand = Expect | Cancel | FetchPrefix | Grant | MarkCached
AttentionEvent = FetchEnded | ReadRequested | ReadEnded | ReceiveEnded | SendEnded | ReceivedBytes

ENCODER = msgspec.msgpack.Encoder()
OPENING = msgspec.msgpack.Decoder(Opening)
ATTACH_REPLY = msgspec.msgpack.Decoder(AttachReply)
COMMAND = msgspec.msgpack.Decoder(AttentionCommand)
EVENT = msgspec.msgpack.Decoder(AttentionEvent)

# Step connection

HEADER = struct.Struct("<IBxHII")  # moonpool_engine/engine/native/ring.h has the same
PLAN, Q, KEYS_VALUES, ATTENDED, FAILED, ECHO = range(1, 7)
MAX_PLAN_BYTES = 64 << 20
MAX_TEXT_BYTES = 4096
MAX_ECHO_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a step message: kind, layer and step of a payload of `num_bytes`."""

    num_bytes: int
    kind: int
    layer: int
    step: int
    busy_ns: int = 0  # in ATTENDED, the time that storing and attending took

    def pack(self) -> bytes:
        return HEADER.pack(self.num_bytes, self.kind, self.layer, self.step, self.busy_ns)


class SequenceRows(msgspec.Struct, frozen=True, array_like=True):
    """Rows of S sequences, as in `StepMeta`. Bytes of int32 arrays; block ids are the attention
    worker's own."""

    positions: bytes  # [T]
    row_starts: bytes  # shape [S + 1]
    context_starts: bytes  # [S]
    block_tables: bytes  # [S, max blocks]
    num_sequences: int

    def meta(self) -> StepMeta:
        """Raises ValueError if the arrays do not fit each other."""
        tables = _numbers(self.block_tables)
        positions, starts = _numbers(self.positions), _numbers(self.row_starts)
        return StepMeta(
            positions=positions,
            row_starts=starts,
            context_starts=_numbers(self.context_starts),
            block_tables=tables.view(self.num_sequences, len(tables) // max(self.num_sequences, 1)),
            num_rows=len(positions),
            num_sequences=self.num_sequences,
        )


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One attention worker's share of a step.

    `stores`: rows whose K and V the worker stores. `whole`: sequences that lie entirely at this
    worker. The first rows of Q belong to these; the worker returns their outputs. `parts`: one
    entry for each segment at this worker of sequences that lie at several workers. The worker
    returns their partials, after the outputs. `segments`: the segment number of each entry of
    `parts`. `part_rows`: the row of Q of each row of `parts`. Both fields are bytes of int32
    arrays. `epoch`: see the module's docstring. `early`: whether to attend to old tokens as soon as
    Q has arrived; otherwise only after K and V have arrived, too.
    """

    stores: SequenceRows
    whole: SequenceRows
    parts: SequenceRows
    segments: bytes
    part_rows: bytes
    num_queries: int
    epoch: int
    early: bool = True


def rows_of(
    positions: np.ndarray[tuple[int], np.dtype[np.int32]],
    row_starts: np.ndarray[tuple[int], np.dtype[np.int32]],
    context_starts: np.ndarray[tuple[int], np.dtype[np.int32]],
    block_tables: np.ndarray[tuple[int, int], np.dtype[np.int32]],
) -> SequenceRows:
    """Packs the arrays; their shapes are those of `SequenceRows`."""
    return SequenceRows(
        positions.tobytes(),
        row_starts.tobytes(),
        context_starts.tobytes(),
        block_tables.tobytes(),
        len(context_starts),
    )


def _numbers(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, np.int32).copy())
