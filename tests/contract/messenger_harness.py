"""Runs two messengers, and peers that misbehave on purpose, for the transport contract suite."""

from __future__ import annotations

import queue
import random
import socket
import time
import weakref
from typing import TypeVar

import pytest

from moonpool.link.auth import ClientHandshake, Identity
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.transfer_events import MessengerEvent, PeerAddress
from moonpool.types import BlockKey, InstanceId
from moonpool_engine.engine.native.slices import open_slices
from moonpool_engine.transfer import nixl, shm, tcp
from moonpool_engine.transfer.arena import Arena, Checksum, PeerArenas, checksum_slice
from moonpool_engine.transfer.authentication import authenticate_frames
from moonpool_engine.transfer.connection import Connection
from moonpool_engine.transfer.frame_socket import FrameSocket
from moonpool_engine.transfer.local_peer import LocalPeer
from moonpool_engine.transfer.messenger import Messenger, TransferLimits
from moonpool_engine.transfer.nixl_agent import NixlAgent, has_nixl
from moonpool_engine.transfer.reshard import ShardView
from moonpool_engine.transfer.slice_copier import PlainSliceCopier, fastest_copier
from moonpool_engine.transfer.tls_frames import connected
from tests.certificates import shared_tls

SECRET = b"a secret of the tests"
NUM_BLOCKS = 32
T = TypeVar("T")


def make_layout(head_dim: int = 8, num_layers: int = 3, model: str = "tiny") -> BlockLayout:
    """Makes a layout, by default with slices of 256 bytes."""
    return BlockLayout(
        model_fingerprint=model,
        dtype="float32",
        block_tokens=4,
        num_layers=num_layers,
        num_kv_heads=1,
        head_dim=head_dim,
    )


class Node:
    """Holds one instance: arena, messenger and the events it received."""

    def __init__(
        self,
        name: str,
        transport: str,
        layout: BlockLayout | None = None,
        *,
        secret: bytes = SECRET,
        lease_s: float = 120.0,
        park_s: float = 120.0,
        checksum: Checksum = checksum_slice,
        native: bool = False,
        num_blocks: int = NUM_BLOCKS,
        shard_view: ShardView | None = None,
    ) -> None:
        """With a `shard_view`, `layout` describes the stored part of the slices of
        `make_layout`."""
        self.layout = layout or make_layout()
        self.arena = Arena(self.layout, num_blocks, shard_view, sealed=transport != "nixl")
        self.nixl_agent = NixlAgent(self.arena, "127.0.0.1") if transport == "nixl" else None
        self.events: queue.SimpleQueue[MessengerEvent] = queue.SimpleQueue()
        self.messenger = Messenger(
            self.arena,
            make_layout() if shard_view else self.layout,
            LocalPeer(
                InstanceId(name),
                secret,
                tls=shared_tls() if transport == "tls" else None,
                use_shared_memory=transport == "shm",
            ),
            self.events.put,
            fastest_copier(self.arena, open_slices()) if native else PlainSliceCopier(checksum),
            self.nixl_agent,
            TransferLimits(lease_s, park_s),
        )
        self.address: PeerAddress = self.messenger.start()

    def fill(self, seed: int) -> None:
        self.arena.buffer[:] = random.Random(seed).randbytes(self.arena.num_bytes)

    def block(self, block_id: int) -> bytes:
        size = self.layout.block_bytes
        return bytes(self.arena.buffer[block_id * size : (block_id + 1) * size])

    def expect_event(self, kind: type[T], within_s: float = 60.0) -> T:
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
    by_s = time.monotonic() + 60
    if transport == "shm":
        return shm.connect(address.unix_name, by_s)
    port = address.nixl_port if transport == "nixl" else address.tcp_port
    return tcp.connect(address.tcp_host, port, by_s)


def rogue_connection(
    address: PeerAddress, transport: str, layout: BlockLayout, arena: Arena
) -> Connection:
    """Returns an authenticated connection on which a test can send invalid messages."""
    by_s = time.monotonic() + 60
    sock = bare_socket(address, transport)
    frames = connected(shared_tls(), sock) if transport == "tls" else FrameSocket(sock)
    frames.begin(by_s)
    me = Identity(instance_id=InstanceId("rogue"), service="blocks", fingerprint=layout.fingerprint)
    authenticate_frames(frames, ClientHandshake(SECRET, me), by_s)
    if transport == "shm":
        return shm.exchange_arenas(
            frames, address.instance_id, arena, PeerArenas(), PlainSliceCopier(), by_s
        )
    if transport == "nixl":
        agent = NixlAgent(Arena(layout, arena.num_blocks, sealed=False), "127.0.0.1")
        made = nixl.exchange_metadata(frames, address.instance_id, agent, time.monotonic() + 60)
        weakref.finalize(made, agent.close)
        return made
    return tcp.TcpConnection(frames, address.instance_id, PlainSliceCopier())
