"""Measures one message from a model worker to an attention worker and back, compared with the
machine's limits.

Owns the ways of exchange that are compared. The bare exchanges are between two C++ threads that
share only a flag and the bytes of a message. In one variant they poll; in the other they sleep on a
futex, as threads on a shared core must. Moonpool's exchange goes between processes, over the same
ring, header and waits as in a step. It is started once from C++, and once from the Python code of a
step.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import time
from collections.abc import Iterator

from moonpool.types import Struct
from moonpool_engine.attention_offload.channel import RING_DATA_BYTES, AttentionChannel, RingChannel
from moonpool_engine.attention_offload.wire import ECHO, HEADER, Header
from moonpool_engine.engine.native.shared_memory import Rings, open_rings

ROUNDS = 4000
TURNS = 5
QUICK_TURNS = 12  # of 1 ms each from C++, which one interruption distorts
NO_TIME = float("nan")


class RoundTrip(Struct, frozen=True):
    """Seconds of one message; the best of several turns."""

    num_bytes: int
    bare_spin_s: float
    bare_futex_s: float
    native_s: float
    python_s: float
    socket_s: float


def measure_round_trip(num_bytes: int, ring: AttentionChannel, socket_s: float) -> RoundTrip:
    """Measures all ways in turns, so that other load affects all of them. The socket is measured by
    `echo_s`."""
    rings = open_rings()
    found: list[list[float]] = [[], [], [], []]
    for _ in range(TURNS):
        for _ in range(QUICK_TURNS):
            found[0].append(_bare_s(rings, num_bytes, spins=True))
            found[2].append(_native_s(rings, ring, num_bytes))
        found[1].append(_bare_s(rings, num_bytes, spins=False))
        found[3].append(_echo_s(ring, num_bytes))
    spin, futex, native, python = map(min, found)
    return RoundTrip(num_bytes, spin, futex, native, python, socket_s)


def echo_s(channel: AttentionChannel, num_bytes: int) -> float:
    """One message over any channel, asked by Python."""
    return min(_echo_s(channel, num_bytes) for _ in range(TURNS))


def lines(trips: tuple[RoundTrip, ...]) -> Iterator[str]:
    yield (
        "one message there and back (us):  bytes  bare, looks  bare, sleeps  ours, C++  ratio"
        "  ours, Python  ratio  socket"
    )
    for trip in trips:
        yield (
            f"{trip.num_bytes:>39} {trip.bare_spin_s * 1e6:>12.2f} {trip.bare_futex_s * 1e6:>13.1f}"
            f" {trip.native_s * 1e6:>10.2f} {trip.native_s / trip.bare_spin_s:>6.1f}"
            f" {trip.python_s * 1e6:>13.2f} {trip.python_s / trip.bare_spin_s:>6.1f}"
            f" {trip.socket_s * 1e6:>7.1f}"
        )


def _echo_s(channel: AttentionChannel, size: int) -> float:
    payload, back = memoryview(bytearray(size)), memoryview(bytearray(size))
    header = Header(size, ECHO, 0, 0)
    began_s = time.perf_counter()
    for _ in range(ROUNDS):
        channel.send(header, payload)
        channel.receive(back)
    return (time.perf_counter() - began_s) / ROUNDS


def _native_s(rings: Rings | None, channel: AttentionChannel, size: int) -> float:
    if rings is None or not isinstance(channel, RingChannel):
        return NO_TIME
    head = ctypes.create_string_buffer(Header(size, ECHO, 0, 0).pack(), HEADER.size)
    body = ctypes.create_string_buffer(size)
    places = ctypes.addressof(head), ctypes.addressof(body)
    waiter = ctypes.addressof(channel.waiter)
    nanoseconds = rings.ask(
        channel.outward, channel.inward, channel.capacity, *places, size, ROUNDS, waiter
    )
    return nanoseconds / 1e9 if nanoseconds > 0 else NO_TIME


def _bare_s(rings: Rings | None, size: int, spins: bool) -> float:
    if rings is None:
        return NO_TIME
    with _memory(RING_DATA_BYTES + 2 * size) as base:
        theirs, ours = ctypes.create_string_buffer(size), ctypes.create_string_buffer(size)
        rest = size, ROUNDS, int(spins)
        arguments = base, ctypes.addressof(theirs), *rest, 1
        answering = threading.Thread(target=rings.bare_ping, args=arguments)
        answering.start()
        nanoseconds = rings.bare_ping(base, ctypes.addressof(ours), *rest, 0)
        answering.join()
    return nanoseconds / 1e9 if nanoseconds > 0 else NO_TIME


@contextlib.contextmanager
def _memory(size: int) -> Iterator[int]:
    memory = mmap.mmap(-1, size)
    held = ctypes.c_char.from_buffer(memory)
    yield ctypes.addressof(held)
    del held
