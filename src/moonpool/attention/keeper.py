"""An attention worker's inside: the arena it keeps, its messenger, and whose blocks they are.

It has one owner at a time, a model worker, and needs no model: the owner tells the layout. When the
owner goes, arena and names stay, so that the next one finds its blocks again. Whatever writes a
block takes its name first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import torch

from moonpool.attention.control import (
    Attach,
    Attached,
    Cancel,
    Expect,
    Fetch,
    Grant,
    Named,
    Order,
)
from moonpool.attention.hand import Hand
from moonpool.attention.partition import HeadRange
from moonpool.attention.port import Port, PortError
from moonpool.engine.native.slices import open_slices
from moonpool.engine.ops import HeadShape, KvCache, SplitOps
from moonpool.engine.slices import cut_of_heads
from moonpool.kvcache.layout import BlockLayout
from moonpool.kvcache.transfers import MessengerEvent, PeerAddress, ReadEnded
from moonpool.messenger.arena import Arena
from moonpool.messenger.cut import NOWHERE, Cut
from moonpool.messenger.messenger import Messenger
from moonpool.types import BlockId, BlockKey, InstanceId

log = logging.getLogger("moonpool.attention")


class AttachError(Exception):
    """The owner cannot be served; one line says why."""


@dataclass(slots=True)
class _Kept:
    """What outlives an owner."""

    layout: BlockLayout  # of whole blocks
    kv_heads: HeadRange | None
    arena: Arena
    cache: KvCache
    names: dict[BlockId, BlockKey] = field(default_factory=dict)


class Keeper:
    """Thread-safe. `make_arena(layout, num_blocks, cut)` decides how many blocks 0 means; `layout`
    is of the share that is kept."""

    def __init__(
        self,
        instance_id: InstanceId,
        secret: bytes,
        ops: SplitOps,
        make_arena: Callable[[BlockLayout, int, Cut | None], Arena],
        listen_host: str,
        use_shared_memory: bool,
    ) -> None:
        self._instance_id = instance_id
        self._secret = secret
        self._ops = ops
        self._make_arena = make_arena
        self._listen_host = listen_host
        self._use_shared_memory = use_shared_memory
        self._lock = threading.Lock()  # guards what follows
        self._kept: _Kept | None = None
        self._messenger: Messenger | None = None
        self._written: dict[BlockId, int] = {}  # epoch of the last write, of this owner
        self._attached: Attach | None = None

    def attach(self, wanted: Attach, post: Callable[[MessengerEvent], None]) -> Attached:
        """The owner before must be gone. Raises AttachError, ArenaError or OSError."""
        # What follows the name of the kernels tells of weights, of which there are none here.
        if not f"{wanted.layout.arithmetic} ".startswith(f"{self._ops.arithmetic} "):
            raise AttachError(
                f"its attention computes with {self._ops.arithmetic!r}, the model worker with"
                f" {wanted.layout.arithmetic!r}: install the same release on the same kind of CPU"
            )
        if wanted.num_heads < 1 or wanted.num_heads % wanted.layout.num_kv_heads:
            raise AttachError(f"{wanted.num_heads} heads do not fit {wanted.layout}")
        heads = wanted.kv_heads
        if heads is not None and not (
            0 <= heads.first < heads.first + heads.count <= wanted.layout.num_kv_heads
        ):
            raise AttachError(f"the model has no kv heads {heads}")
        self.detach()
        with self._lock:
            kept = self._kept
            if kept is None or not _serves(kept, wanted):
                if kept is not None:
                    self._kept = None
                    kept.arena.close()
                own, cut = _share(wanted)
                arena = self._make_arena(own, wanted.num_blocks, cut)
                cache = _cache_over(arena)
                kept = self._kept = _Kept(wanted.layout, wanted.kv_heads, arena, cache)
            self._written = {}
            self._attached = wanted
            self._messenger = Messenger(
                kept.arena,
                kept.layout,
                self._instance_id,
                self._secret,
                self._noting(post),
                tcp_host=self._listen_host,
                use_shared_memory=self._use_shared_memory,
                native=open_slices(),
            )
            address: PeerAddress = self._messenger.start()
            return Attached(
                address=address, num_blocks=kept.arena.num_blocks, named=tuple(kept.names.items())
            )

    def detach(self) -> None:
        """Ends what the owner had under way; its blocks stay."""
        with self._lock:
            messenger, self._messenger, self._attached = self._messenger, None, None
        if messenger is not None:
            messenger.close()

    def close(self) -> None:
        self.detach()
        with self._lock:
            if self._kept is not None:
                self._kept.arena.close()
                self._kept = None

    def received_bytes(self) -> dict[str, int]:
        messenger = self._messenger
        return {} if messenger is None else dict(messenger.counts().received_bytes)

    def perform(self, order: Order) -> None:
        """In the order in which the owner gave them."""
        messenger = self._messenger
        if messenger is None:
            return
        match order:
            case Expect():
                self._writing(order.block_ids, order.epoch)
                messenger.expect(
                    order.stream_id, order.block_ids, order.first_index, order.timeout_s
                )
            case Cancel():
                messenger.cancel(order.stream_id)
            case Fetch():
                self._writing(order.block_ids, order.epoch)
                messenger.fetch(
                    order.fetch_id, order.source, order.keys, order.block_ids, order.timeout_s
                )
            case Grant():
                messenger.grant(order.read_id, order.block_ids)
            case Named():
                self._name(order)

    def serve_steps(self, port: Port) -> None:
        """Until the owner is gone."""
        hand, wanted = self.hand(), self._attached
        if hand is None or wanted is None:
            return
        torch.set_num_threads(wanted.threads)  # holds for the calling thread only
        try:
            hand.serve(port)
        except PortError as error:
            log.info("the steps of %s are over: %s", wanted.owner, error)

    def hand(self) -> Hand | None:
        """That attends for the owner; None if there is none any more."""
        with self._lock:
            kept, wanted = self._kept, self._attached
        if kept is None or wanted is None:
            return None
        layout = kept.arena.layout
        group = wanted.num_heads // wanted.layout.num_kv_heads
        heads = HeadShape(group * layout.num_kv_heads, layout.num_kv_heads, layout.head_dim)

        def writing(block_ids: Iterable[int], epoch: int) -> None:
            blocks = [BlockId(b) for b in block_ids]
            self._writing(blocks, epoch)
            kept.arena.sums.forget(blocks)

        return Hand(self._ops, kept.cache, heads, wanted.scale, writing)

    def _writing(self, block_ids: Iterable[BlockId], epoch: int) -> None:
        with self._lock:
            kept = self._kept
            for block_id in block_ids:
                if block_id == NOWHERE:
                    continue
                self._written[block_id] = max(epoch, self._written.get(block_id, 0))
                if kept is not None:
                    kept.names.pop(block_id, None)

    def _name(self, order: Named) -> None:
        with self._lock:
            kept = self._kept
            if kept is None:
                return
            for block_id, key in order.blocks:
                if self._written.get(block_id, 0) <= order.epoch and kept.arena.holds(block_id):
                    kept.names[block_id] = key

    def _noting(self, post: Callable[[MessengerEvent], None]) -> Callable[[MessengerEvent], None]:
        def noted(event: MessengerEvent) -> None:
            if isinstance(event, ReadEnded) and event.corrupt and self._kept is not None:
                with self._lock:
                    for block_id in event.corrupt:
                        self._kept.names.pop(block_id, None)
            post(event)

        return noted


def _serves(kept: _Kept, wanted: Attach) -> bool:
    same = (kept.layout, kept.kv_heads) == (wanted.layout, wanted.kv_heads)
    return same and wanted.num_blocks in (0, kept.arena.num_blocks)


def _share(wanted: Attach) -> tuple[BlockLayout, Cut | None]:
    """The layout of what is kept, and what of whole slices that is."""
    heads, layout = wanted.kv_heads, wanted.layout
    if heads is None or heads.count == layout.num_kv_heads:
        return layout, None
    own = msgspec.structs.replace(layout, num_kv_heads=heads.count)
    ranges = cut_of_heads(layout, heads.first, heads.count)
    return own, Cut(whole_bytes=layout.slice_bytes, ranges=ranges)


def _cache_over(arena: Arena) -> KvCache:
    layout = arena.layout
    dtype = torch.bfloat16 if layout.dtype == "bfloat16" else torch.float32
    flat = torch.frombuffer(arena.buffer, dtype=dtype)
    shape = (arena.num_blocks, layout.num_layers, layout.slice_elements)
    return KvCache(flat.view(shape), layout)
