"""The state of an attention worker: its arena, its messenger, and its current owner.

The worker has one owner at a time, a model worker, and needs no model: the owner gives the layout.
Arena and keys outlive the owner, so that the next owner can reuse the blocks. Every write to a
block takes its key first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import torch

from moonpool.link.tls import PeerTls
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.transfer_events import MessengerEvent, PeerAddress, ReadEnded
from moonpool.types import BlockId, BlockKey, InstanceId
from moonpool_engine.attention_offload.channel import AttentionChannel, AttentionChannelError
from moonpool_engine.attention_offload.executor import AttentionExecutor
from moonpool_engine.attention_offload.wire import (
    Attach,
    Attached,
    AttentionCommand,
    Cancel,
    Expect,
    FetchPrefix,
    Grant,
    KvHeadRange,
    MarkCached,
)
from moonpool_engine.engine.native.slices import open_slices
from moonpool_engine.engine.ops import HeadShape, KvCache, SplitOps, block_dtype
from moonpool_engine.engine.slices import cut_of_heads
from moonpool_engine.transfer.arena import Arena
from moonpool_engine.transfer.local_peer import LocalPeer
from moonpool_engine.transfer.messenger import Messenger
from moonpool_engine.transfer.reshard import NOWHERE, ShardView
from moonpool_engine.transfer.slice_copier import fastest_copier

log = logging.getLogger("moonpool_engine.attention_offload")


class AttachError(Exception):
    """The owner cannot be served; the message is one line."""


@dataclass(slots=True)
class _RetainedState:
    """The blocks, which outlive an owner."""

    layout: BlockLayout  # layout of whole blocks, with all KV heads
    kv_heads: KvHeadRange | None
    arena: Arena
    cache: KvCache
    keys: dict[BlockId, BlockKey] = field(default_factory=dict)


class AttentionWorkerState:
    """Thread-safe."""

    def __init__(
        self,
        instance_id: InstanceId,
        secret: bytes,
        ops: SplitOps,
        make_arena: Callable[[BlockLayout, int, ShardView | None], Arena],
        listen_host: str,
        use_shared_memory: bool,
        tls: PeerTls | None = None,
    ) -> None:
        """`make_arena(layout, num_blocks, view)` makes the arena; it decides how many blocks
        `num_blocks` = 0 means. `layout` describes blocks with this worker's heads."""
        self._peer = LocalPeer(instance_id, secret, listen_host, tls, use_shared_memory)
        self._ops = ops
        self._make_arena = make_arena
        self._lock = threading.Lock()  # guards the fields below
        self._retained: _RetainedState | None = None
        self._messenger: Messenger | None = None
        self._written: dict[BlockId, int] = {}  # epoch of the owner's last write
        self._attached: Attach | None = None

    def attach(self, request: Attach, post: Callable[[MessengerEvent], None]) -> Attached:
        """Begins to serve an owner, and ends the operations of the former one. `post` gets the
        events of the worker's messenger. Raises AttachError, ArenaError or OSError."""
        # After the name of the kernels, `arithmetic` describes weights, which an attention worker
        # does not have.
        if not f"{request.layout.arithmetic} ".startswith(f"{self._ops.arithmetic} "):
            raise AttachError(
                f"its attention computes with {self._ops.arithmetic!r}, the model worker with"
                f" {request.layout.arithmetic!r}: install the same release on the same kind of CPU"
            )
        if request.num_heads < 1 or request.num_heads % request.layout.num_kv_heads:
            raise AttachError(
                f"{request.num_heads} heads are not a multiple of the KV heads of {request.layout}"
            )
        _check_rules(request)
        heads = request.kv_heads
        if heads is not None and not (
            0 <= heads.first < heads.first + heads.count <= request.layout.num_kv_heads
        ):
            raise AttachError(f"the model does not have the kv heads {heads}")
        self.detach()
        with self._lock:
            retained = self._retained
            if retained is None or not _serves(retained, request):
                if retained is not None:
                    self._retained = None
                    retained.arena.close()
                own, view = _share(request)
                arena = self._make_arena(own, request.num_blocks, view)
                cache = _cache_over(arena)
                retained = self._retained = _RetainedState(
                    request.layout, request.kv_heads, arena, cache
                )
            self._written = {}
            self._attached = request
            self._messenger = Messenger(
                retained.arena,
                retained.layout,
                self._peer,
                self._uncaching_corrupt(post),
                fastest_copier(retained.arena, open_slices()),
            )
            address: PeerAddress = self._messenger.start()
            return Attached(
                address=address,
                num_blocks=retained.arena.num_blocks,
                cached=tuple(retained.keys.items()),
            )

    def detach(self) -> None:
        """Ends the owner's operations; its blocks stay."""
        with self._lock:
            messenger, self._messenger, self._attached = self._messenger, None, None
        if messenger is not None:
            messenger.close()

    def close(self) -> None:
        """Ends everything and frees the arena."""
        self.detach()
        with self._lock:
            if self._retained is not None:
                self._retained.arena.close()
                self._retained = None

    def received_bytes(self) -> dict[str, int]:
        """Bytes that the messenger has received, by transport."""
        messenger = self._messenger
        return {} if messenger is None else dict(messenger.counts().received_bytes)

    def perform(self, command: AttentionCommand) -> None:
        """Performs a command. Must be called in the order in which the owner sent the commands."""
        messenger = self._messenger
        if messenger is None:
            return
        match command:
            case Expect():
                self._on_write(command.block_ids, command.epoch)
                messenger.expect(
                    command.stream_id, command.block_ids, command.first_index, command.timeout_s
                )
            case Cancel():
                messenger.cancel(command.stream_id)
            case FetchPrefix():
                self._on_write(command.block_ids, command.epoch)
                messenger.fetch(
                    command.fetch_id,
                    command.source,
                    command.keys,
                    command.block_ids,
                    command.timeout_s,
                )
            case Grant():
                messenger.grant(command.read_id, command.block_ids)
            case MarkCached():
                self._mark_cached(command)

    def serve_steps(self, channel: AttentionChannel) -> None:
        """Serves steps until the owner is gone."""
        executor, request = self.executor(), self._attached
        if executor is None or request is None:
            return
        # the number of threads holds for the calling thread only
        torch.set_num_threads(request.threads)
        try:
            executor.serve(channel)
        except AttentionChannelError as error:
            log.info("the step connection of %s has ended: %s", request.owner, error)

    def executor(self) -> AttentionExecutor | None:
        """Makes the executor that attends for the owner, or returns None if the owner is gone."""
        with self._lock:
            retained, request = self._retained, self._attached
        if retained is None or request is None:
            return None
        layout = retained.arena.layout
        group = request.num_heads // request.layout.num_kv_heads
        heads = HeadShape(
            group * layout.num_kv_heads, layout.num_kv_heads, layout.head_dim, request.latent_dim
        )
        first = 0 if request.kv_heads is None else request.kv_heads.first * group
        rules = [rule.rule(first, heads.num_heads) for rule in request.rules]

        def on_write(block_ids: Iterable[int], epoch: int) -> None:
            blocks = [BlockId(b) for b in block_ids]
            self._on_write(blocks, epoch)
            retained.arena.checksums.forget(blocks)

        return AttentionExecutor(self._ops, retained.cache, heads, request.scale, on_write, rules)

    def _on_write(self, block_ids: Iterable[BlockId], epoch: int) -> None:
        """Takes the keys of blocks that are about to be written, and notes the epoch."""
        with self._lock:
            retained = self._retained
            for block_id in block_ids:
                if block_id == NOWHERE:
                    continue
                self._written[block_id] = max(epoch, self._written.get(block_id, 0))
                if retained is not None:
                    retained.keys.pop(block_id, None)

    def _mark_cached(self, command: MarkCached) -> None:
        """Enters keys, except of blocks that were written after the command's epoch."""
        with self._lock:
            retained = self._retained
            if retained is None:
                return
            for block_id, key in command.blocks:
                is_current = self._written.get(block_id, 0) <= command.epoch
                if is_current and retained.arena.holds(block_id):
                    retained.keys[block_id] = key

    def _uncaching_corrupt(
        self, post: Callable[[MessengerEvent], None]
    ) -> Callable[[MessengerEvent], None]:
        """Returns a `post` that also removes the keys of blocks that a peer found corrupt."""

        def forward(event: MessengerEvent) -> None:
            if isinstance(event, ReadEnded) and event.corrupt and self._retained is not None:
                with self._lock:
                    for block_id in event.corrupt:
                        self._retained.keys.pop(block_id, None)
            post(event)

        return forward


def _check_rules(request: Attach) -> None:
    """Raises AttachError."""
    layout, latent = request.layout, request.latent_dim
    if layout.is_latent != (latent > 0) or not 0 <= latent <= layout.head_dim or latent % 16:
        raise AttachError(f"a latent of {latent} elements does not fit {layout}")
    rules = request.rules
    if len(rules) not in (0, layout.num_layers) or not all(
        rule.is_sound(request.num_heads) for rule in rules
    ):
        raise AttachError(f"the attention of its layers does not fit {layout}")


def _serves(retained: _RetainedState, request: Attach) -> bool:
    same = (retained.layout, retained.kv_heads) == (request.layout, request.kv_heads)
    return same and request.num_blocks in (0, retained.arena.num_blocks)


def _share(request: Attach) -> tuple[BlockLayout, ShardView | None]:
    """Returns the layout of the worker's heads, and which part of whole slices they are."""
    heads, layout = request.kv_heads, request.layout
    if heads is None or heads.count == layout.num_kv_heads:
        return layout, None
    own = msgspec.structs.replace(layout, num_kv_heads=heads.count)
    ranges = cut_of_heads(layout, heads.first, heads.count)
    return own, ShardView(whole_bytes=layout.slice_bytes, ranges=ranges)


def _cache_over(arena: Arena) -> KvCache:
    layout = arena.layout
    flat = torch.frombuffer(arena.buffer, dtype=block_dtype(layout))
    shape = (arena.num_blocks, layout.num_layers, layout.slice_elements)
    return KvCache(flat.view(shape), layout)
