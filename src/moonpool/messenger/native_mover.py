"""Slices moved and summed by the kernels' `slices.cpp`, with the GIL free.

Within a host what is copied is summed as it is read, and written around the cache: one pass. What
arrived over a socket is summed while it is in the cache.
Knows nothing of who may touch which block. The library is found by whoever makes the messenger.
"""

from __future__ import annotations

import ctypes
import os
import struct
from array import array
from collections.abc import Callable
from typing import Protocol

from moonpool.messenger.arena import Arena
from moonpool.messenger.landing_table import LandingTable
from moonpool.messenger.mover import PlainMover
from moonpool.messenger.peer_arena import PeerArena
from moonpool.messenger.transport import FrameSocket, PeerGoneError, ProtocolError, TransportError
from moonpool.messenger.wire import OFFER, unpack_offers

MIN_SLICE_BYTES = 256
STRIPE_BYTES = 64
FEW_SLICES = 4
FEW_BYTES = 256 << 10
"""So many, of so many bytes together, are cheaper moved one by one than prepared for a call."""

_TABLE = struct.Struct("@4P4q")
_DONE, _OUTSIDE, _AGAIN, _CLOSED, _BROKEN = range(5)
Call = Callable[..., int]


class SliceCalls(Protocol):
    """The functions of `slices.cpp`; `engine.native.slices` binds them."""

    @property
    def name(self) -> Call: ...

    @property
    def copy(self) -> Call: ...

    @property
    def receive(self) -> Call: ...

    @property
    def send(self) -> Call: ...


def fits(arena: Arena) -> bool:
    """Whether the kernels take slices of this size."""
    return arena.slice_bytes >= MIN_SLICE_BYTES and arena.slice_bytes % STRIPE_BYTES == 0


class NativeMover:
    """See `mover.Mover`. For arenas that `fits`."""

    group_bytes = 2 << 20

    def __init__(self, calls: SliceCalls) -> None:
        self._calls = calls
        self._plain = PlainMover()

    def name(self, arena: Arena, offers: bytearray, start: int, end: int, most_bytes: int) -> int:
        if _few(end - start, arena):
            return self._plain.name(arena, offers, start, end, most_bytes)
        base, sums = _address(arena.buffer), arena.sums.address
        named = array("q", (0,))
        first = _address(offers)
        code = self._calls.name(
            ctypes.addressof(first) + start * OFFER.size,
            end - start,
            ctypes.addressof(base),
            sums,
            arena.num_blocks,
            arena.layout.num_layers,
            arena.slice_bytes,
            most_bytes,
            named.buffer_info()[0],
        )
        if code != _DONE:
            raise ValueError("a slice to be sent is outside the arena")
        return start + named[0]

    def send(
        self, frames: FrameSocket, body: bytes, offers: bytes, arena: Arena, deadline_s: float
    ) -> None:
        count = len(offers) // OFFER.size
        if _few(count, arena):
            self._plain.send(frames, body, offers, arena, deadline_s)
            return
        head, base = frames.head_of(body), _address(arena.buffer)
        state, silent = array("q", (0, 0)), ""
        while True:
            frames.arm(deadline_s, silent)
            code = self._calls.send(
                frames.fileno(),
                head,
                len(head),
                offers,
                count,
                ctypes.addressof(base),
                arena.layout.num_layers,
                arena.slice_bytes,
                int(deadline_s * 1e9),
                state.buffer_info()[0],
            )
            if code == _DONE:
                return
            if code != _AGAIN:
                raise PeerGoneError(f"the connection broke: {os.strerror(state[1])}")
            silent = "the peer took nothing until the deadline"

    def receive(
        self, frames: FrameSocket, offers: bytes, table: LandingTable, deadline_s: float
    ) -> int:
        arena, count = table.arena, len(offers) // OFFER.size
        if table.passage is not None or _few(count, arena):
            return self._plain.receive(frames, offers, table, deadline_s)
        base = _address(arena.buffer)
        packed = _packed(table, base)
        ahead = frames.take_ahead(count * arena.slice_bytes)
        self._place(ahead, offers, table)
        state, silent = array("q", (len(ahead), 0, 0, 0)), ""
        while True:
            frames.arm(deadline_s, silent)
            code = self._calls.receive(
                frames.fileno(),
                offers,
                count,
                packed,
                int(deadline_s * 1e9),
                state.buffer_info()[0],
            )
            if code == _DONE:
                return state[2]
            if code != _AGAIN:
                raise self._failure(code, state[3], offers, table)
            silent = "the peer sent nothing until the deadline"

    def copy(self, source: PeerArena, offers: bytes, table: LandingTable) -> int:
        if table.passage is not None:
            return self._plain.copy(source, offers, table)
        base, corrupt = _address(table.arena.buffer), array("q", (0,))
        code = self._calls.copy(
            offers,
            len(offers) // OFFER.size,
            _packed(table, base),
            source.address,
            source.num_blocks,
            corrupt.buffer_info()[0],
        )
        if code == _DONE:
            return corrupt[0]
        self._plain.copy(source, offers, table)  # says what is wrong with them
        raise ProtocolError("slices were offered that cannot be")

    def _place(self, ahead: memoryview, offers: bytes, table: LandingTable) -> None:
        """What the socket's reader took in beyond the message is where the slices begin."""
        if not ahead:
            return
        size, buffer = table.arena.slice_bytes, table.arena.buffer
        first = unpack_offers(offers[: -(-len(ahead) // size) * OFFER.size])
        for number, place in enumerate(table.places(first)):
            part = ahead[number * size : (number + 1) * size]
            buffer[place : place + len(part)] = part

    def _failure(self, code: int, errno: int, offers: bytes, table: LandingTable) -> TransportError:
        if code == _OUTSIDE:
            table.places(unpack_offers(offers))  # says which
        if code == _CLOSED:
            return PeerGoneError("the peer closed the connection")
        return PeerGoneError(f"the connection broke: {os.strerror(errno)}")


def _few(count: int, arena: Arena) -> bool:
    return count <= FEW_SLICES and count * arena.slice_bytes <= FEW_BYTES


def _address(memory: memoryview | bytearray) -> ctypes.c_char:
    """Holds the memory in place for as long as it lives."""
    return ctypes.c_char.from_buffer(memory)


def _packed(table: LandingTable, base: ctypes.c_char) -> bytes:
    arena = table.arena
    return _TABLE.pack(
        ctypes.addressof(base),
        table.blocks.buffer_info()[0],
        arena.sums.address,
        ctypes.addressof(_address(table.cells)),
        table.first,
        len(table.blocks),
        table.num_layers,
        arena.slice_bytes,
    )
