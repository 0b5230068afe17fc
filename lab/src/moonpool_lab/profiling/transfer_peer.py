"""Runs the other process of `bench transfer`: it grants reads, receives streams, and serves bare
sockets."""

from __future__ import annotations

import mmap
import os
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe

from moonpool.link.tls import PeerTls
from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.transfer_events import (
    MessengerEvent,
    PeerAddress,
    ReadRequested,
    ReceiveEnded,
)
from moonpool.types import BlockId, InstanceId, Struct
from moonpool_engine.engine.native.slices import open_slices
from moonpool_engine.transfer.arena import Arena
from moonpool_engine.transfer.local_peer import LocalPeer
from moonpool_engine.transfer.messenger import TCP_CONNECTIONS, Messenger, TransferLimits
from moonpool_engine.transfer.nixl_agent import NixlAgent, has_nixl
from moonpool_engine.transfer.slice_copier import fastest_copier

SECRET = b"benchmark"
TIMEOUT_S = 30.0
TlsPaths = tuple[str, str, str]
"""Paths of certificate, key and authority, as `PeerTls` takes them."""
INDEX_BYTES = 4
TAKEN = b"k"


class RemoteAddress(Struct, frozen=True):
    """The addresses of the other process."""

    messengers: dict[str, PeerAddress]
    bare: dict[str, str | tuple[str, int]]


def transports(tls: TlsPaths | None) -> tuple[str, ...]:
    """Returns the transports that can be measured here."""
    more = (("tls", tls is not None), ("nixl", has_nixl()))
    return ("shm", "tcp", *(name for name, takes_part in more if takes_part))


def make_layout(block_bytes: int) -> BlockLayout:
    """Returns the layout of blocks of this size in slices of 64 KiB, or 256 KiB above 4 MiB.

    Models of 8 to 70 billion parameters have such slices.
    """
    slice_bytes = (64 if block_bytes <= 4 << 20 else 256) << 10
    return BlockLayout(
        model_fingerprint="benchmark",
        dtype="bfloat16",
        block_tokens=slice_bytes >> 10,
        num_layers=block_bytes // slice_bytes,
        num_kv_heads=2,
        head_dim=128,
    )


def make_messenger(
    name: str,
    transport: str,
    arena: Arena,
    post: Callable[[MessengerEvent], None],
    tcp_connections: int = TCP_CONNECTIONS,
    tls: TlsPaths | None = None,
) -> Messenger:
    """Makes a messenger. `tls` applies only to the transport of this name."""
    encrypted = PeerTls(*tls) if tls and transport == "tls" else None
    peer = LocalPeer(InstanceId(name), SECRET, tls=encrypted, use_shared_memory=transport == "shm")
    return Messenger(
        arena,
        arena.layout,
        peer,
        post,
        fastest_copier(arena, open_slices()),
        NixlAgent(arena, "127.0.0.1") if transport == "nixl" else None,
        TransferLimits(lease_s=TIMEOUT_S, tcp_connections=tcp_connections),
    )


def run_far(pipe: Pipe, block_bytes: int, num_blocks: int, tls: TlsPaths | None = None) -> None:
    """Serves until None comes through the pipe. The keys of a read are numbers of blocks."""
    arena = Arena(make_layout(block_bytes), num_blocks, sealed=not has_nixl())
    arena.buffer[:] = os.urandom(1 << 16) * (arena.num_bytes >> 16)
    messengers = {transport: _serve(transport, arena, tls) for transport in transports(tls)}
    listeners = {"tcp": socket.create_server(("127.0.0.1", 0)), "unix": socket.socket(1)}
    listeners["inside"] = socket.socket(socket.AF_UNIX)
    for kind in ("unix", "inside"):
        listeners[kind].bind(f"\0moonpool-benchmark-{kind}-{os.getpid()}")
        listeners[kind].listen()
    for kind, listener in listeners.items():
        target = _look if kind == "inside" else _answer
        threading.Thread(target=target, args=(listener, arena), daemon=True).start()
    pipe.send(
        RemoteAddress(
            messengers={name: messenger.start() for name, messenger in messengers.items()},
            bare={
                "tcp": ("127.0.0.1", listeners["tcp"].getsockname()[1]),
                "unix": listeners["unix"].getsockname().decode("latin-1"),
                "inside": listeners["inside"].getsockname().decode("latin-1"),
            },
        )
    )
    while (command := pipe.recv()) is not None:
        transport, expected = command
        for stream_id, blocks in expected:
            messengers[transport].expect(stream_id, blocks, 0, TIMEOUT_S)
        pipe.send("expecting")
    for messenger in messengers.values():
        messenger.close()


def _serve(transport: str, arena: Arena, tls: TlsPaths | None) -> Messenger:
    def post(event: MessengerEvent) -> None:
        if isinstance(event, ReadRequested):
            blocks = [BlockId(int.from_bytes(key, "big")) for key in event.keys]
            messenger.grant(event.read_id, blocks)
        elif isinstance(event, ReceiveEnded) and (event.error or event.incomplete):
            raise RuntimeError(f"a stream failed: {event}")

    messenger = make_messenger("far", transport, arena, post, tls=tls)
    return messenger


def _answer(listener: socket.socket, arena: Arena) -> None:
    """Serves one connection: a block's number requests its bytes; a number above the last block
    announces that the bytes of a block follow."""
    sock, _ = listener.accept()
    size = arena.layout.block_bytes
    while len(head := sock.recv(INDEX_BYTES, socket.MSG_WAITALL)) == INDEX_BYTES:
        number = int.from_bytes(head, "big")
        block = number % arena.num_blocks
        view = arena.buffer[block * size : (block + 1) * size]
        if number < arena.num_blocks:
            sock.sendall(view)
        else:
            receive_into(sock, view)
            sock.sendall(TAKEN)


def _look(listener: socket.socket, own: Arena) -> None:
    """Reads blocks in place, like the stages and ranks of an instance, which map the arena.

    A block's number is answered with its first and its last byte.
    """
    sock, _ = listener.accept()
    _, (fd,), _, _ = socket.recv_fds(sock, 1, 1)
    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE  # like a step that has touched the memory
    mapped = memoryview(mmap.mmap(fd, own.num_bytes, flags=flags, prot=mmap.PROT_READ))
    os.close(fd)
    size = own.block_bytes
    while len(head := sock.recv(INDEX_BYTES, socket.MSG_WAITALL)) == INDEX_BYTES:
        start = int.from_bytes(head, "big") * size
        sock.sendall(bytes((mapped[start], mapped[start + size - 1])))


def receive_into(sock: socket.socket, view: memoryview) -> None:
    """Fills `view`. Raises RuntimeError if the other process closes the connection too early."""
    filled = 0
    while filled < len(view):
        count = sock.recv_into(view[filled:])
        if not count:
            raise RuntimeError("the other process closed the connection")
        filled += count
