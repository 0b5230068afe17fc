"""Measures blocks between two processes, against memcpy, bare sockets and other pools.

A put is a layer stream of one block, a get is a fetch of one block. Small blocks are also moved
several at a time in one request ("many"), as when an instance fetches a prefix; other pools use
their own calls for many blocks. Each round measures every kind of transfer once, so that a busy
moment affects all of them. The result is the median of the ratios per round.

A put is a block's first send, so both sides hash it. A get reads a block that was sent or received
before, like all blocks of a pool, so its checksums are cached and only the reader hashes. The bare
sockets and the other pools compute no checksums. "verify in place" is the hash alone, the least
time of a verified read without a copy. "read in place" is a read by another process of the same
instance, a stage or a rank, which has the arena mapped and receives only the block's number.
"""

from __future__ import annotations

import multiprocessing
import queue
import socket
import statistics
import subprocess
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from moonpool.protocol.transfer_events import FetchEnded, MessengerEvent, SendEnded
from moonpool.types import BlockId, BlockKey
from moonpool_engine.engine.native.slices import open_slices
from moonpool_engine.transfer.arena import Arena
from moonpool_engine.transfer.nixl_agent import has_nixl
from moonpool_engine.transfer.slice_copier import NativeSliceCopier, PlainSliceCopier, SliceCopier
from moonpool_engine.transfer.wire import pack_offers
from moonpool_lab.profiling.transfer_flows import flows_table, measure_flows
from moonpool_lab.profiling.transfer_peer import (
    INDEX_BYTES,
    TAKEN,
    TIMEOUT_S,
    RemoteAddress,
    TlsPaths,
    make_layout,
    make_messenger,
    receive_into,
    run_far,
    transports,
)

ARENA_BYTES = 64 << 20  # larger than most CPU caches; the blocks are used in turn
MAX_OPERATIONS = 128
MANY = 16
LOOKS = 16
"""The number of reads per operation, because a single read is too short to time."""
MANY_UP_TO_BYTES = 1 << 20
LIMITS = {
    "shm": {"get": "memcpy", "put": "memcpy"},
    "tcp": {"get": "tcp socket get", "put": "tcp socket put"},
    "tls": {"get": "tcp socket get", "put": "tcp socket put"},
    "nixl": {"get": "tcp socket get", "put": "tcp socket put"},
}


class TransferBenchError(RuntimeError):
    """Says in one line why the benchmark could not run."""


class LocalTransfer:
    """The side of this process. Each method moves `count` blocks one after another and returns the
    seconds."""

    def __init__(
        self, pipe: Pipe, block_bytes: int, count: int, tls: TlsPaths | None = None
    ) -> None:
        self._pipe = pipe
        self._transports = transports(tls)
        self._size, self._count = block_bytes, count
        layout = make_layout(block_bytes)
        self._blocks = ARENA_BYTES // block_bytes
        self._arena = Arena(layout, self._blocks, sealed=not has_nixl())
        self._spare = Arena(layout, self._blocks)
        calls = open_slices()
        self._slice_copier: SliceCopier = (
            PlainSliceCopier() if calls is None else NativeSliceCopier(calls)
        )
        self._arena.buffer[:] = np.random.default_rng(0).bytes(ARENA_BYTES)
        far: RemoteAddress = pipe.recv()
        self._far = far.messengers
        self._sockets = {
            "tcp": socket.create_connection(far.bare["tcp"]),  # type: ignore[arg-type]
            "unix": socket.socket(socket.AF_UNIX),
        }
        self._sockets["tcp"].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sockets["unix"].connect(far.bare["unix"])
        self._inside = socket.socket(socket.AF_UNIX)
        self._inside.connect(far.bare["inside"])
        socket.send_fds(self._inside, [b"a"], [self._arena.fd])
        self._events: queue.SimpleQueue[MessengerEvent] = queue.SimpleQueue()
        self._messengers = {
            way: make_messenger("near", way, self._arena, self._events.put, tls=tls)
            for way in self._transports
        }
        for messenger in self._messengers.values():
            messenger.start()
        self._number = 0

    def ways(self) -> dict[str, Callable[[], float]]:
        ways: dict[str, Callable[[], float]] = {
            "memcpy": self._memcpy,
            "verify in place": self._verify,
            "read in place": self._look,
        }
        for kind in self._sockets:
            ways[f"{kind} socket get"] = lambda kind=kind: self._bare_get(kind)  # type: ignore[misc]
            ways[f"{kind} socket put"] = lambda kind=kind: self._bare_put(kind)  # type: ignore[misc]
        for way in self._transports:
            ways[f"{way} get"] = lambda way=way: self._get(way)  # type: ignore[misc]
            ways[f"{way} put"] = lambda way=way: self._put(way)  # type: ignore[misc]
            if _takes_many(self._size, self._count):
                ways[f"{way} get many"] = lambda way=way: self._get(way, MANY)  # type: ignore[misc]
                ways[f"{way} put many"] = lambda way=way: self._put(way, MANY)  # type: ignore[misc]
        return ways

    def close(self) -> None:
        for messenger in self._messengers.values():
            messenger.close()
        for sock in (*self._sockets.values(), self._inside):
            sock.close()
        self._pipe.send(None)

    def _next(self) -> int:
        self._number = (self._number + 1) % self._blocks
        return self._number

    def _view(self, block: int) -> memoryview:
        return self._arena.buffer[block * self._size : (block + 1) * self._size]

    def _memcpy(self) -> float:
        source = np.frombuffer(self._arena.buffer, np.uint8).reshape(self._blocks, -1)
        target = np.frombuffer(self._spare.buffer, np.uint8).reshape(self._blocks, -1)
        began_s = time.perf_counter()
        for _ in range(self._count):
            block = self._next()
            np.copyto(target[block], source[block])
        return time.perf_counter() - began_s

    def _verify(self) -> float:
        """Hashes blocks, because a verified read in place would still have to hash them."""
        blocks = [BlockId(self._next()) for _ in range(self._count)]
        layers = range(self._arena.layout.num_layers)
        named = [bytearray(pack_offers((0, n, block, 0) for n in layers)) for block in blocks]
        self._arena.checksums.forget(blocks)
        began_s = time.perf_counter()
        for offers in named:
            self._slice_copier.fill_checksums(self._arena, offers, 0, len(layers), self._size)
        return time.perf_counter() - began_s

    def _look(self) -> float:
        """Sends block numbers to another process, which reads the blocks in place."""
        began_s = time.perf_counter()
        for _ in range(self._count * LOOKS):
            block = self._next()
            self._inside.sendall(block.to_bytes(INDEX_BYTES, "big"))
            view = self._view(block)
            if self._inside.recv(2, socket.MSG_WAITALL) != bytes((view[0], view[-1])):
                raise TransferBenchError("the other process read other bytes in place")
        return (time.perf_counter() - began_s) / LOOKS

    def _bare_get(self, kind: str) -> float:
        sock = self._sockets[kind]
        began_s = time.perf_counter()
        for _ in range(self._count):
            block = self._next()
            sock.sendall(block.to_bytes(INDEX_BYTES, "big"))
            receive_into(sock, self._view(block))
        return time.perf_counter() - began_s

    def _bare_put(self, kind: str) -> float:
        sock = self._sockets[kind]
        began_s = time.perf_counter()
        for _ in range(self._count):
            block = self._next()
            sock.sendall((block + self._blocks).to_bytes(INDEX_BYTES, "big"))
            sock.sendall(self._view(block))
            if sock.recv(1) != TAKEN:
                raise TransferBenchError("the other process did not receive the block")
        return time.perf_counter() - began_s

    def _get(self, way: str, many: int = 1) -> float:
        messenger = self._messengers[way]
        began_s = time.perf_counter()
        for _ in range(self._count // many):
            blocks = [BlockId(self._next()) for _ in range(many)]
            keys = [BlockKey(block.to_bytes(16, "big")) for block in blocks]
            messenger.fetch("get", self._far[way], keys, blocks, TIMEOUT_S)
            ended = self._events.get(timeout=TIMEOUT_S)
            if not isinstance(ended, FetchEnded) or ended.num_blocks != many:
                raise TransferBenchError(f"a fetch failed: {ended}")
        return time.perf_counter() - began_s

    def _put(self, way: str, many: int = 1) -> float:
        messenger = self._messengers[way]
        requests = [
            (f"{way} {place}", [BlockId(self._next()) for _ in range(many)])
            for place in range(self._count // many)
        ]
        self._arena.checksums.forget(block for _, blocks in requests for block in blocks)
        self._pipe.send((way, requests))
        self._pipe.recv()
        layers = range(self._arena.layout.num_layers)
        began_s = time.perf_counter()
        for name, blocks in requests:
            messenger.open_stream(name, self._far[way], TIMEOUT_S)
            placed = list(enumerate(blocks))
            messenger.send(name, [(index, b, layer) for layer in layers for index, b in placed])
            messenger.finish_stream(name)
            ended = self._events.get(timeout=TIMEOUT_S)
            if not isinstance(ended, SendEnded) or ended.error:
                raise TransferBenchError(f"a stream failed: {ended}")
        return time.perf_counter() - began_s


class ExternalPools:
    """Other pools, run by the Python of another installation."""

    def __init__(self, python: str) -> None:
        script = Path(__file__).with_name("pools_peer.py")
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the user named this Python
                [python, str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        except OSError as error:
            raise TransferBenchError(f"--peer-python {python} cannot be run: {error}") from error
        said = self._read()
        self.names: list[str] = said["peers"]
        self.absent: dict[str, str] = said["absent"]

    def seconds(self, peer: str, what: str, size: int, count: int, many: int) -> float:
        asked = {"peer": peer, "what": what, "size": size, "count": count, "many": many}
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(asked).decode() + "\n")
        self._process.stdin.flush()
        return float(self._read()["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise TransferBenchError(
                "the peers' process ended; run pools_peer.py by hand to see why"
            )
        return msgspec.json.decode(line)


def bench_transfer(
    sizes: tuple[int, ...],
    rounds: int,
    peer_python: str | None,
    say: Callable[[str], None],
    tls: TlsPaths | None = None,
) -> dict[str, Any]:
    """Returns the figures by block size in bytes. With `tls`, TCP is also measured with encryption.
    Raises TransferBenchError."""
    pools = None if peer_python is None else ExternalPools(peer_python)
    try:
        for name, reason in (pools.absent if pools else {}).items():
            say(f"{name} does not take part: {reason}")
        found = {str(size): _measure(size, rounds, pools, tls) for size in sizes}
    finally:
        if pools is not None:
            pools.close()
    for size, figures in found.items():
        say(_table(int(size), figures))
    flows = measure_flows(rounds)
    say(flows_table(flows))
    absent = pools.absent if pools else {}
    return {"rounds": rounds, "sizes": found, "flows": flows, "absent": absent}


def _measure(
    size: int, rounds: int, pools: ExternalPools | None, tls: TlsPaths | None
) -> dict[str, Any]:
    count = max(4, min(MAX_OPERATIONS, ARENA_BYTES // size))
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=run_far, args=(there, size, ARENA_BYTES // size, tls))
    process.start()
    there.close()  # This end is closed here, so that the pipe ends when the other process ends.
    near = LocalTransfer(here, size, count, tls)
    ways = near.ways()
    for peer in pools.names if pools else []:
        for what in ("get", "put"):
            ways[f"{peer} {what}"] = lambda peer=peer, what=what: pools.seconds(  # type: ignore
                peer, what, size, count, 1
            )
            if _takes_many(size, count):
                ways[f"{peer} {what} many"] = lambda peer=peer, what=what: pools.seconds(  # type: ignore
                    peer, what, size, count, MANY
                )
    taken_s: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds + 1):
        for way, run in ways.items():
            seconds = run() / count
            if number:  # The first round warms up and opens the connections.
                taken_s[way].append(seconds)
    near.close()
    process.join()
    return {"operations_per_round": count, **_figures(size, taken_s)}


def _takes_many(size: int, count: int) -> bool:
    return size <= MANY_UP_TO_BYTES and count >= MANY


def _figures(size: int, taken_s: dict[str, list[float]]) -> dict[str, Any]:
    def over(way: str, other: str) -> float:
        pairs = zip(taken_s[way], taken_s[other], strict=True)
        return statistics.median(theirs / ours for ours, theirs in pairs)

    ratios = {}
    for transport in ("shm", "tcp", "tls", "nixl"):
        for what in ("get", "put", "get many", "put many"):
            ours = f"{transport} {what}"
            if ours not in taken_s:
                continue
            others = [LIMITS[transport][what.removesuffix(" many")]]
            others += [f"tcp {what}"] if transport == "tls" else []
            others += [f"{peer} {what}" for peer in ("mooncake", "redis")]
            ratios[ours] = {other: over(ours, other) for other in others if other in taken_s}
    medians = {way: statistics.median(values) for way, values in taken_s.items()}
    return {
        "gb_per_s": {way: size / median_s / 1e9 for way, median_s in medians.items()},
        "best_gb_per_s": {way: size / min(values) / 1e9 for way, values in taken_s.items()},
        "operations_per_s": {way: 1 / median_s for way, median_s in medians.items()},
        "speed_over": ratios,
    }


def _table(size: int, figures: dict[str, Any]) -> str:
    lines = [f"blocks of {size >> 10} KiB      GB/s    best   us each   speed over"]
    for way, rate in figures["gb_per_s"].items():
        best, each_us = figures["best_gb_per_s"][way], 1e6 / figures["operations_per_s"][way]
        beside = figures["speed_over"].get(way, {})
        ratios = "  ".join(f"{other} {ratio:.2f}" for other, ratio in beside.items())
        lines.append(f"  {way:18s}{rate:10.2f}{best:8.2f}{each_us:10.0f}   {ratios}")
    return "\n".join(lines)
