"""How fast blocks move between two processes, beside what the machine can do at all.

    python benchmarks/transfer.py [--rounds 15] [--json FILE]

Each round runs every way once, so that a busy moment hits all alike. A stream sends a 4096-token
prefix of a 24-layer model (1536 slices of 64 KiB, 100 MB) layer by layer; a fetch pulls the same
blocks. Both are timed from the call to the terminal event: connecting, authenticating, hashing on
both sides and the acknowledgement included. The limits, measured in the same rounds: memcpy of the
same bytes in one thread, and `sendall` / `recv_into` on a bare, connected socket, unhashed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import queue
import socket
import statistics
import subprocess
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import numpy as np

from moonpool.kvcache.layout import BlockLayout
from moonpool.kvcache.transfers import (
    FetchEnded,
    MessengerEvent,
    PeerAddress,
    ReadRequested,
    ReceiveEnded,
    SendEnded,
)
from moonpool.messenger.arena import Arena
from moonpool.messenger.messenger import Messenger
from moonpool.types import BlockId, BlockKey, InstanceId

LAYOUT = BlockLayout(
    model_fingerprint="benchmark",
    dtype="bfloat16",
    block_tokens=64,
    num_layers=24,
    num_kv_heads=2,
    head_dim=128,
)
NUM_BLOCKS = 64
NUM_BYTES = NUM_BLOCKS * LAYOUT.block_bytes
SECRET = b"benchmark"
TIMEOUT_S = 30.0
BLOCK_IDS = [BlockId(block) for block in range(NUM_BLOCKS)]
KEYS = [BlockKey(block.to_bytes(16, "big")) for block in range(NUM_BLOCKS)]


class Peer:
    """The other process: expects streams, grants reads, and drains bare sockets."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self.arena = Arena(LAYOUT, NUM_BLOCKS)
        self.messengers: dict[str, Messenger] = {}

    def serve(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        unix = socket.socket(socket.AF_UNIX)
        unix.bind(f"\0moonpool-benchmark-{os.getpid()}")
        unix.listen()
        self.pipe.send(
            (self._start("shm"), self._start("tcp"), listener.getsockname(), unix.getsockname())
        )
        sockets = {"tcp": listener.accept()[0], "unix": unix.accept()[0]}
        while (command := self.pipe.recv())[0] != "end":
            if command[0] == "expect":
                self.messengers[command[1]].expect(command[2], BLOCK_IDS, 0, TIMEOUT_S)
                self.pipe.send("expecting")
            elif command[0] == "drain":
                self.pipe.send("draining")
                self._drain(sockets[command[1]])
        for messenger in self.messengers.values():
            messenger.close()

    def _start(self, transport: str) -> PeerAddress:
        def post(event: MessengerEvent) -> None:
            if isinstance(event, ReadRequested):
                messenger.grant(event.read_id, BLOCK_IDS)
            elif isinstance(event, ReceiveEnded):
                assert not event.error, event.error
                assert not event.corrupt, event.corrupt

        messenger = self.messengers[transport] = make_messenger("peer", transport, self.arena, post)
        return messenger.start()

    def _drain(self, sock: socket.socket) -> None:
        target = self.arena.buffer
        filled = 0
        while filled < NUM_BYTES:
            filled += sock.recv_into(target[filled:])
        sock.sendall(b"k")


def make_messenger(
    name: str, transport: str, arena: Arena, post: Callable[[MessengerEvent], None]
) -> Messenger:
    shared = transport == "shm"
    return Messenger(
        arena, LAYOUT, InstanceId(name), SECRET, post, use_shared_memory=shared, lease_s=TIMEOUT_S
    )


def run_peer(pipe: Pipe) -> None:
    Peer(pipe).serve()


class Bench:
    """This process: times each way once per round. Results are seconds per way."""

    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe
        self.arena = Arena(LAYOUT, NUM_BLOCKS)
        noise = np.random.default_rng(0).bytes(NUM_BYTES)
        self.arena.buffer[:] = noise
        self.spare = Arena(LAYOUT, NUM_BLOCKS)
        shm_peer, tcp_peer, tcp_raw, unix_raw = pipe.recv()
        self.peers: dict[str, PeerAddress] = {"shm": shm_peer, "tcp": tcp_peer}
        self.sockets = {"tcp": socket.create_connection(tcp_raw), "unix": socket.socket(1)}
        self.sockets["unix"].connect(unix_raw)
        self.events: queue.SimpleQueue[MessengerEvent] = queue.SimpleQueue()
        self.messengers = {
            way: make_messenger("bench", way, self.arena, self.events.put) for way in self.peers
        }
        for messenger in self.messengers.values():
            messenger.start()
        self.enqueue_s: list[float] = []

    def memcpy(self) -> float:
        source = np.frombuffer(self.arena.buffer, np.uint8)
        target = np.frombuffer(self.spare.buffer, np.uint8)
        start_s = time.perf_counter()
        np.copyto(target, source)
        return time.perf_counter() - start_s

    def raw(self, kind: str) -> float:
        sock = self.sockets[kind]
        self._ask("drain", kind)
        start_s = time.perf_counter()
        sock.sendall(self.arena.buffer)
        assert sock.recv(1) == b"k"
        return time.perf_counter() - start_s

    def stream(self, transport: str) -> float:
        messenger = self.messengers[transport]
        stream_id = f"stream {len(self.enqueue_s)}"
        self._ask("expect", transport, stream_id)
        start_s = time.perf_counter()
        messenger.open_stream(stream_id, self.peers[transport], TIMEOUT_S)
        for layer in range(LAYOUT.num_layers):
            slices = [(block, BlockId(block), layer) for block in range(NUM_BLOCKS)]
            sending_s = time.perf_counter()
            messenger.send(stream_id, slices)
            self.enqueue_s.append(time.perf_counter() - sending_s)
        messenger.finish_stream(stream_id)
        ended = self.events.get(timeout=TIMEOUT_S)
        taken_s = time.perf_counter() - start_s
        assert isinstance(ended, SendEnded), ended
        assert not ended.error, ended.error
        assert ended.num_bytes == NUM_BYTES
        return taken_s

    def fetch(self, transport: str) -> float:
        start_s = time.perf_counter()
        messenger = self.messengers[transport]
        messenger.fetch("fetch", self.peers[transport], KEYS, BLOCK_IDS, TIMEOUT_S)
        ended = self.events.get(timeout=TIMEOUT_S)
        taken_s = time.perf_counter() - start_s
        assert isinstance(ended, FetchEnded), ended
        assert ended.num_blocks == NUM_BLOCKS, ended
        return taken_s

    def _ask(self, *command: str) -> None:
        self.pipe.send(command)
        self.pipe.recv()


def measure(rounds: int) -> dict[str, object]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=run_peer, args=(there,))
    process.start()
    there.close()  # so that the peer's death is noticed
    bench = Bench(here)
    ways: dict[str, Callable[[], float]] = {
        "memcpy": bench.memcpy,
        "raw unix socket": lambda: bench.raw("unix"),
        "raw tcp socket": lambda: bench.raw("tcp"),
        "shm stream": lambda: bench.stream("shm"),
        "shm fetch": lambda: bench.fetch("shm"),
        "tcp stream": lambda: bench.stream("tcp"),
        "tcp fetch": lambda: bench.fetch("tcp"),
    }
    taken_s: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            taken_s[way].append(run())
    here.send(("end",))
    for messenger in bench.messengers.values():
        messenger.close()
    process.join()
    rates = {way: [NUM_BYTES / s / 1e9 for s in times] for way, times in taken_s.items()}
    return {
        "layout": {"slice_bytes": LAYOUT.slice_bytes, "slices": NUM_BLOCKS * LAYOUT.num_layers},
        "rounds": rounds,
        "commit": commit(),
        "best_gb_per_s": {way: round(max(values), 2) for way, values in rates.items()},
        "median_gb_per_s": {
            way: round(statistics.median(values), 2) for way, values in rates.items()
        },
        "enqueue_us_per_layer": round(statistics.median(bench.enqueue_s) * 1e6, 1),
    }


def commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent,
        check=False,
    )
    return found.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measure(options.rounds)
    best, median = found["best_gb_per_s"], found["median_gb_per_s"]
    assert isinstance(best, dict)
    assert isinstance(median, dict)
    print(f"{NUM_BYTES / 1e6:.0f} MB, {options.rounds} rounds, commit {found['commit']}")
    print(f"{'GB/s':18s}{'best':>8s}{'median':>8s}{'of memcpy':>11s}")
    for way in best:
        share = best[way] / best["memcpy"]
        print(f"{way:18s}{best[way]:8.2f}{median[way]:8.2f}{share:11.2f}")
    print(f"send() takes {found['enqueue_us_per_layer']} us for a layer of {NUM_BLOCKS} slices")
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
