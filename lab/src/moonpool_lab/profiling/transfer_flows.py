"""Measures a large TCP fetch over one and several connections, with and without a limit for each.

The loopback has no limit. A relay paces each connection to FLOW_BYTES_PER_S, as clouds limit single
flows.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import socket
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from moonpool.protocol.transfer_events import FetchEnded, MessengerEvent, PeerAddress
from moonpool.types import BlockId, BlockKey
from moonpool_engine.transfer.arena import Arena
from moonpool_lab.profiling.transfer_peer import (
    TIMEOUT_S,
    RemoteAddress,
    make_layout,
    make_messenger,
    run_far,
)

# the number in asm-generic/socket.h, because Python has no name for this option
SO_MAX_PACING_RATE = 47
_CHUNK_BYTES = 256 << 10


class FlowLimit:
    """A relay from `port` on the loopback to the real address, which runs until it is closed.

    The kernel paces the answers of each connection. Requests are not paced.
    """

    def __init__(self, host: str, port: int, bytes_per_s: int) -> None:
        self._target = host, port
        self._listener = socket.create_server(("127.0.0.1", 0))
        # Accepted sockets inherit the pacing rate.
        self._listener.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_s)
        self.port: int = self._listener.getsockname()[1]
        self.num_accepted = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self.num_accepted += 1
                for pair in ((near, far), (far, near)):
                    pair[1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=_pass_on, args=pair, daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with contextlib.suppress(OSError):
        while count := source.recv_into(buffer):
            target.sendall(buffer[:count])
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        source.shutdown(socket.SHUT_RDWR)


BLOCK_BYTES = 1 << 20
NUM_BLOCKS = 64
CONNECTIONS = (1, 2, 4)
FLOW_BYTES_PER_S = 125_000_000


def measure_flows(rounds: int) -> dict[str, dict[str, float]]:
    """Returns the median GB/s over the rounds, by path and number of connections."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=run_far, args=(there, BLOCK_BYTES, NUM_BLOCKS))
    process.start()
    there.close()
    far: RemoteAddress = here.recv()
    address = far.messengers["tcp"]
    relay = FlowLimit(address.tcp_host, address.tcp_port, FLOW_BYTES_PER_S)
    paths = {
        "loopback": address,
        "limited flows": msgspec.structs.replace(
            address, tcp_host="127.0.0.1", tcp_port=relay.port
        ),
    }
    arena = Arena(make_layout(BLOCK_BYTES), NUM_BLOCKS)
    ways: list[tuple[str, str, Callable[[], float]]] = []
    closing = []
    for connections in CONNECTIONS:
        fetch, close = _fetcher(arena, connections)
        closing.append(close)
        for name, path in paths.items():
            ways.append((name, str(connections), lambda fetch=fetch, path=path: fetch(path)))  # type: ignore[misc]
    taken_s: dict[tuple[str, str], list[float]] = {(name, many): [] for name, many, _ in ways}
    for number in range(rounds + 1):
        for name, many, run in ways:
            seconds = run()
            if number:  # The first round only opens the connections.
                taken_s[name, many].append(seconds)
    for close in closing:
        close()
    relay.close()
    here.send(None)
    process.join()
    size = BLOCK_BYTES * NUM_BLOCKS
    return {
        name: {
            many: size / statistics.median(taken_s[name, many]) / 1e9
            for many in map(str, CONNECTIONS)
        }
        for name in paths
    }


def flows_table(found: dict[str, Any]) -> str:
    """Formats the figures as a table."""
    lines = [f"a fetch of {NUM_BLOCKS * BLOCK_BYTES >> 20} MiB by TCP, connections       GB/s"]
    for name, rates in found.items():
        for many, rate in rates.items():
            lines.append(f"  {name:32s}{many:>6s}{rate:14.2f}")
    return "\n".join(lines)


def _fetcher(
    arena: Arena, connections: int
) -> tuple[Callable[[PeerAddress], float], Callable[[], None]]:
    events: queue.SimpleQueue[MessengerEvent] = queue.SimpleQueue()
    messenger = make_messenger("near", "tcp", arena, events.put, tcp_connections=connections)
    messenger.start()
    blocks = [BlockId(number) for number in range(NUM_BLOCKS)]
    keys = [BlockKey(block.to_bytes(16, "big")) for block in blocks]

    def fetch(source: PeerAddress) -> float:
        began_s = time.perf_counter()
        messenger.fetch("get", source, keys, blocks, TIMEOUT_S)
        ended = events.get(timeout=TIMEOUT_S)
        if not isinstance(ended, FetchEnded) or ended.num_blocks != NUM_BLOCKS:
            raise RuntimeError(f"a fetch failed: {ended}")
        return time.perf_counter() - began_s

    return fetch, messenger.close
