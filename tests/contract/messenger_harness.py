"""Two messengers, and peers that misbehave on purpose, for the transport contract suite."""

from __future__ import annotations

import queue
import random
import socket
import time
import weakref
from typing import TypeVar

import pytest

from moonpool.engine.native.slices import open_slices
from moonpool.kvcache.layout import BlockLayout
from moonpool.kvcache.transfers import MessengerEvent, PeerAddress
from moonpool.messenger import nixl, shm, tcp
from moonpool.messenger.arena import Arena
from moonpool.messenger.auth import ClientHandshake, Identity, authenticate_frames
from moonpool.messenger.courier import Courier, has_nixl
from moonpool.messenger.cut import Cut
from moonpool.messenger.landing_table import Checksum, checksum_slice
from moonpool.messenger.messenger import Messenger
from moonpool.messenger.mover import PlainMover
from moonpool.messenger.peer_arena import PeerArenas
from moonpool.messenger.transport import Connection, FrameSocket
from moonpool.types import BlockKey, InstanceId

SECRET = b"a secret of the tests"
NUM_BLOCKS = 32
T = TypeVar("T")


def make_layout(head_dim: int = 8, num_layers: int = 3, model: str = "tiny") -> BlockLayout:
    """256-byte slices unless told otherwise."""
    return BlockLayout(
        model_fingerprint=model,
        dtype="float32",
        block_tokens=4,
        num_layers=num_layers,
        num_kv_heads=1,
        head_dim=head_dim,
    )


class Node:
    """One instance: arena, messenger and the events it got."""

    def __init__(
        self,
        name: str,
        transport: str,
        layout: BlockLayout | None = None,
        *,
        secret: bytes = SECRET,
        lease_s: float = 5.0,
        park_s: float = 2.0,
        checksum: Checksum = checksum_slice,
        native: bool = False,
        num_blocks: int = NUM_BLOCKS,
        cut: Cut | None = None,
    ) -> None:
        """With a `cut`, `layout` is of what the arena keeps of slices as `make_layout` has them."""
        self.layout = layout or make_layout()
        self.arena = Arena(self.layout, num_blocks, cut, sealed=transport != "nixl")
        self.courier = Courier(self.arena, "127.0.0.1") if transport == "nixl" else None
        self.events: queue.SimpleQueue[MessengerEvent] = queue.SimpleQueue()
        self.messenger = Messenger(
            self.arena,
            make_layout() if cut else self.layout,
            InstanceId(name),
            secret,
            self.events.put,
            lease_s=lease_s,
            park_s=park_s,
            use_shared_memory=transport == "shm",
            checksum=checksum,
            courier=self.courier,
            native=open_slices() if native else None,
        )
        self.address: PeerAddress = self.messenger.start()

    def fill(self, seed: int) -> None:
        self.arena.buffer[:] = random.Random(seed).randbytes(self.arena.num_bytes)

    def block(self, block_id: int) -> bytes:
        size = self.layout.block_bytes
        return bytes(self.arena.buffer[block_id * size : (block_id + 1) * size])

    def expect_event(self, kind: type[T], within_s: float = 3.0) -> T:
        event = self.events.get(timeout=within_s)
        assert isinstance(event, kind), event
        return event

    def expect_silence(self, for_s: float = 0.05) -> None:
        time.sleep(for_s)
        assert self.events.empty(), self.events.get()

    def close(self) -> None:
        self.messenger.close()
        self.arena.close()


def need_nixl() -> None:
    if not has_nixl():
        pytest.skip("the extra moonpool[nixl] is not installed")


def keys(count: int) -> list[BlockKey]:
    return [BlockKey(number.to_bytes(16, "big")) for number in range(count)]


def bare_socket(address: PeerAddress, transport: str) -> socket.socket:
    by_s = time.monotonic() + 2
    if transport == "shm":
        return shm.connect(address.unix_name, by_s)
    port = address.nixl_port if transport == "nixl" else address.tcp_port
    return tcp.connect(address.tcp_host, port, by_s)


def rogue_connection(
    address: PeerAddress, transport: str, layout: BlockLayout, arena: Arena
) -> Connection:
    """An authenticated connection on which a test can say what no messenger of ours would."""
    by_s = time.monotonic() + 2
    frames = FrameSocket(bare_socket(address, transport))
    me = Identity(instance_id=InstanceId("rogue"), service="blocks", fingerprint=layout.fingerprint)
    authenticate_frames(frames, ClientHandshake(SECRET, me), by_s)
    if transport == "shm":
        return shm.swap_arenas(frames, address.instance_id, arena, PeerArenas(), PlainMover(), by_s)
    if transport == "nixl":
        courier = Courier(Arena(layout, arena.num_blocks, sealed=False), "127.0.0.1")
        made = nixl.swap_cards(frames, address.instance_id, courier, time.monotonic() + 2)
        weakref.finalize(made, courier.close)
        return made
    return tcp.TcpConnection(frames, address.instance_id, PlainMover())
