"""A large fetch by TCP over one connection and over several: on the loopback as it is, and where
each connection gets no more than FLOW_BYTES_PER_S, which is how clouds limit single flows."""

from __future__ import annotations

import multiprocessing
import queue
import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec

from moonpool.bench.flow_limit import FlowLimit
from moonpool.bench.transfer_far import TIMEOUT_S, Far, make_layout, make_messenger, run_far
from moonpool.kvcache.transfers import FetchEnded, MessengerEvent, PeerAddress
from moonpool.messenger.arena import Arena
from moonpool.types import BlockId, BlockKey

BLOCK_BYTES = 1 << 20
NUM_BLOCKS = 64
CONNECTIONS = (1, 2, 4)
FLOW_BYTES_PER_S = 125_000_000


def measure_flows(rounds: int) -> dict[str, dict[str, float]]:
    """GB/s, the median over the rounds, by path and number of connections."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=run_far, args=(there, BLOCK_BYTES, NUM_BLOCKS))
    process.start()
    there.close()
    far: Far = here.recv()
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
            if number:  # the first round connects
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
