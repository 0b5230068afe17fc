"""Checks real bytes: blocks on a disk, and blocks between two messengers.

The number of a case is the seed of its sizes, faults and contents. Whatever is damaged, a block
that counts as arrived must be the right one.
"""

from __future__ import annotations

import queue
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.transfer_events import FetchEnded, LoadEnded, ReadRequested, StoreEnded
from moonpool.types import BlockId, BlockKey
from moonpool_engine.storage.folder import StoreError
from moonpool_engine.storage.store import open_store
from moonpool_engine.transfer.arena import Arena, checksum_slice
from moonpool_engine.transfer.reshard import ShardView
from tests.contract.messenger_harness import Node

NUM_BLOCKS = 16
WAIT_S = 30.0


def _layout(rng: random.Random, model: str = "tiny") -> BlockLayout:
    return BlockLayout(model, "float32", 4, rng.randint(1, 3), 1, rng.choice((8, 64)))


# Blocks on a disk:


def disk_case(case: int) -> None:
    """Stores blocks, may damage the files, and loads the blocks like another process."""
    rng = random.Random(case)
    layout = _layout(rng)
    keys = [BlockKey(rng.randbytes(16)) for _ in range(rng.randint(1, NUM_BLOCKS))]
    with tempfile.TemporaryDirectory(prefix="moonpool-disk-") as name:
        root = Path(name)
        with_store(root, layout, lambda *opened: _put(keys, *opened))
        match case % 4:
            case 1:
                _flip(root, rng, layout, len(keys))
            case 2:
                _swap(root, layout, len(keys))
            case 3:
                _check_other_model(root, layout)
        arrived = with_store(root, layout, lambda *opened: _get(keys, *opened))
        assert arrived == len(keys) or case % 4 in (1, 2), "a good block was not loaded"


def with_store(root: Path, layout: BlockLayout, use: Callable[..., Any]) -> Any:
    events: queue.SimpleQueue[Any] = queue.SimpleQueue()
    arena = Arena(layout, NUM_BLOCKS)
    store = open_store(root, "x", arena, NUM_BLOCKS, events.put)
    try:
        return use(arena, store, events)
    finally:
        store.close()
        arena.close()


def content_of(key: BlockKey, num_bytes: int) -> bytes:
    return random.Random(key).randbytes(num_bytes)


def _put(keys: list[BlockKey], arena: Arena, store: Any, events: Any) -> None:
    size = arena.block_bytes
    for number, key in enumerate(keys):
        arena.buffer[number * size : (number + 1) * size] = content_of(key, size)
    store.store("s", keys, [BlockId(n) for n in range(len(keys))], range(len(keys)))
    ended = events.get(timeout=WAIT_S)
    assert isinstance(ended, StoreEnded) and ended.num_blocks == len(keys), ended


def _get(keys: list[BlockKey], arena: Arena, store: Any, events: Any) -> int:
    size, slots = arena.block_bytes, range(len(keys))
    store.load("l", keys, slots, [BlockId(n) for n in slots], None)
    ended = events.get(timeout=WAIT_S)
    assert isinstance(ended, LoadEnded), ended
    for number, key in enumerate(keys[: ended.num_blocks]):
        found = arena.buffer[number * size : (number + 1) * size]
        assert found == content_of(key, size), "a wrong block was loaded from the disk"
    return ended.num_blocks


def _segment(root: Path) -> Path:
    return next(path for path in sorted(root.rglob("*")) if path.stat().st_size > 1 << 12)


def _flip(root: Path, rng: random.Random, layout: BlockLayout, num_slots: int) -> None:
    """Flips a byte of a stored slice."""
    path = _segment(root)
    data = bytearray(path.read_bytes())
    slot_bytes = _slot_bytes(layout)
    at = rng.randrange(num_slots) * slot_bytes + 4096 + rng.randrange(layout.block_bytes)
    data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _swap(root: Path, layout: BlockLayout, num_slots: int) -> None:
    """Puts each slot in the place of the next slot, like a wrong index."""
    path, size = _segment(root), _slot_bytes(layout)
    data = path.read_bytes()
    slots = [data[n * size : (n + 1) * size] for n in range(num_slots)]
    path.write_bytes(b"".join((*slots[1:], slots[0])) + data[num_slots * size :])


def _slot_bytes(layout: BlockLayout) -> int:
    from moonpool_engine.storage.format import make_geometry

    return make_geometry(layout).slot_bytes


def _check_other_model(root: Path, layout: BlockLayout) -> None:
    """Checks that a folder of one model does not open for another model of the same sizes."""
    other = BlockLayout("other", *layout.__reduce__()[1][1:])
    try:
        with_store(root, other, lambda *opened: None)
    except StoreError:
        return
    raise AssertionError("the folder of one model opens for another")


# Blocks between two messengers:


def wire_case(case: int) -> None:
    """Fetches blocks of which some slices arrive damaged; some peers have another model, or store
    whole slices where this side stores a part."""
    rng = random.Random(case)
    layout = _layout(rng)
    kind, transport = rng.choice(("plain", "damaged", "damaged", "other", "part")), "tcp"
    damaged = rng.randrange(4 * layout.num_layers) if kind == "damaged" else -1
    hashed = iter(range(1 << 30))

    def checksum(data: memoryview) -> int:
        return checksum_slice(data) ^ (next(hashed) == damaged)

    theirs = BlockLayout("other", *layout.__reduce__()[1][1:]) if kind == "other" else layout
    source = Node("source", transport, theirs, checksum=checksum)
    size = layout.slice_bytes
    view = ShardView(size, ((size // 4, size // 2),)) if kind == "part" else None
    reader = _reader(layout, view, transport)
    try:
        source.fill(case)
        _fetch(rng, kind, source, reader, view)
    finally:
        source.close()
        reader.close()


def _reader(layout: BlockLayout, view: ShardView | None, transport: str) -> Node:
    if view is None:
        return Node("reader", transport, layout)
    return _PartNode("reader", transport, layout, view)


class _PartNode(Node):
    """Makes a node whose arena stores a part of each slice of `whole`."""

    def __init__(self, name: str, transport: str, whole: BlockLayout, view: ShardView) -> None:
        from moonpool.protocol.block_layout import DTYPE_BYTES
        from moonpool_engine.transfer.local_peer import LocalPeer
        from moonpool_engine.transfer.messenger import Messenger
        from tests.contract.messenger_harness import SECRET

        head_dim = view.num_bytes // (2 * whole.block_tokens * DTYPE_BYTES[whole.dtype])
        self.layout = BlockLayout(
            whole.model_fingerprint, whole.dtype, 4, whole.num_layers, 1, head_dim
        )
        self.arena = Arena(self.layout, 32, view)
        self.nixl_agent = None
        self.events = queue.SimpleQueue()
        self.messenger = Messenger(
            self.arena, whole, LocalPeer(name, SECRET, use_shared_memory=False), self.events.put
        )
        self.address = self.messenger.start()


def _fetch(
    rng: random.Random, kind: str, source: Node, reader: Node, view: ShardView | None
) -> None:
    keys = [BlockKey(rng.randbytes(16)) for _ in range(4)]
    here = [BlockId(n) for n in rng.sample(range(32), 4)]
    there = [BlockId(n) for n in rng.sample(range(32), 4)]
    reader.messenger.fetch("f", source.address, keys, here, WAIT_S)
    if kind == "other":
        try:
            ended = reader.expect_event(FetchEnded, within_s=5.0)
        except queue.Empty:
            raise AssertionError("a peer of another model was asked for blocks") from None
        assert ended.error and not ended.num_blocks, "a peer of another model was read"
        return
    asked = source.expect_event(ReadRequested)
    source.messenger.grant(asked.read_id, there)
    ended = reader.expect_event(FetchEnded)
    assert ended.num_blocks == 4 or kind == "damaged", ended
    assert ended.num_blocks < 4 or kind != "damaged", "a damaged slice counts as arrived"
    for mine, its in list(zip(here, there, strict=True))[: ended.num_blocks]:
        for layer in range(reader.layout.num_layers):
            right = source.arena.slice(its, layer)
            if view is not None:
                (start, end), *_ = view.ranges
                right = right[start:end]
            assert reader.arena.slice(mine, layer) == right, "a wrong slice arrived"
