"""Copies slices between arenas and sockets, and computes their checksums on the way.

`PlainSliceCopier` works on every machine. `NativeSliceCopier` does the same by the kernels'
`slices.cpp`: within a host it copies and hashes in one pass and writes around the cache; what
arrives over a socket is hashed while it is in the cache. The same tests run with both. Neither
copier knows which blocks may be accessed.
"""

from __future__ import annotations

import ctypes
import os
import struct
from array import array
from collections.abc import Callable
from typing import Protocol

from moonpool_engine.transfer.arena import Arena, ArenaError, Checksum, PeerArena, checksum_slice
from moonpool_engine.transfer.errors import PeerGoneError, ProtocolError, TransportError
from moonpool_engine.transfer.frame_socket import FrameSocket
from moonpool_engine.transfer.slice_receiver import GROUP_BYTES, SliceReceiver
from moonpool_engine.transfer.wire import OFFER, unpack_offers

NATIVE_GROUP_BYTES = 2 << 20
MIN_SLICE_BYTES = 256
STRIPE_BYTES = 64
FEW_SLICES = 4
FEW_BYTES = 256 << 10
"""Up to this many slices, and bytes, are copied one by one: a native call would take longer."""

_TABLE = struct.Struct("@4P4q")
_DONE, _OUTSIDE, _AGAIN, _CLOSED, _BROKEN = range(5)
Call = Callable[..., int]


class SliceCopier(Protocol):
    """Offers are packed (`wire.OFFER`). Methods that receive slices return how many differ from
    their offered checksum. Each call ends by its deadline with a TransportError at the latest.
    Thread-safe."""

    group_bytes: int
    """The most bytes to receive with one call."""

    checksum: Checksum
    """The function that it computes."""

    def fill_checksums(
        self, arena: Arena, offers: bytearray, start: int, end: int, most_bytes: int
    ) -> int:
        """Fills in the checksums of offers `start` to `end` - 1 of slices of our own `arena`: the
        stored one, else the hash of the bytes, which is stored. Returns where it stopped: at `end`,
        or once `most_bytes` were hashed. With `most_bytes` 0 nothing is hashed, and unknown
        checksums stay 0."""
        ...

    def send(
        self, frames: FrameSocket, body: bytes, offers: bytes, arena: Arena, deadline_s: float
    ) -> None:
        """Sends the message `body` and then the bytes of the slices it offers."""
        ...

    def receive(
        self, frames: FrameSocket, offers: bytes, receiver: SliceReceiver, deadline_s: float
    ) -> int:
        """Reads the bytes of the offered slices from the socket."""
        ...

    def copy(self, source: PeerArena, offers: bytes, receiver: SliceReceiver) -> int:
        """Copies the offered slices from a peer's arena on this host. Slices without checksum are
        hashed and count as right."""
        ...


class PlainSliceCopier:
    """Copies with the kernel and numpy, then hashes the group while it is in the cache. Both
    operations release the GIL."""

    group_bytes = GROUP_BYTES

    def __init__(self, checksum: Checksum = checksum_slice) -> None:
        self.checksum = checksum

    def fill_checksums(
        self, arena: Arena, offers: bytearray, start: int, end: int, most_bytes: int
    ) -> int:
        hashed_bytes = 0
        for number in range(start, end):
            index, layer, block_id, _ = OFFER.unpack_from(offers, number * OFFER.size)
            checksum = arena.checksums.get(block_id, layer)
            if not checksum and most_bytes:
                checksum = self.checksum(arena.slice(block_id, layer))
                arena.checksums.set(block_id, layer, checksum)
                hashed_bytes += arena.slice_bytes
            OFFER.pack_into(offers, number * OFFER.size, index, layer, block_id, checksum)
            if most_bytes and hashed_bytes >= most_bytes:
                return number + 1
        return end

    def send(
        self, frames: FrameSocket, body: bytes, offers: bytes, arena: Arena, deadline_s: float
    ) -> None:
        slices = [arena.slice(block_id, layer) for _, layer, block_id, _ in unpack_offers(offers)]
        frames.send_frame(body, deadline_s, slices)

    def receive(
        self, frames: FrameSocket, offers: bytes, receiver: SliceReceiver, deadline_s: float
    ) -> int:
        arena, unpacked = receiver.arena, unpack_offers(offers)
        size, offsets = arena.slice_bytes, receiver.offsets(unpacked)
        targets: list[memoryview] = []
        if receiver.reshard_plan is not None:
            pieces = receiver.reshard_plan.pieces
            targets = [arena.buffer[o + to : o + to + n] for o in offsets for _, to, n in pieces]
            frames.receive_into(targets, deadline_s)
            return receiver.verify(unpacked, offsets)
        start = end = offsets[0]
        for offset in offsets:
            if offset != end:  # adjacent slices are received in one call
                targets.append(arena.buffer[start:end])
                start = offset
            end = offset + size
        targets.append(arena.buffer[start:end])
        frames.receive_into(targets, deadline_s)
        return receiver.verify(unpacked, offsets)

    def copy(self, source: PeerArena, offers: bytes, receiver: SliceReceiver) -> int:
        """Raises ProtocolError for slices outside the peer's arena or not expected."""
        arena, unpacked = receiver.arena, unpack_offers(offers)
        targets, size, plan = receiver.offsets(unpacked), arena.slice_bytes, receiver.reshard_plan
        try:
            sources = source.offsets(unpacked, None if plan is None else plan.source_bytes)
        except ArenaError as error:
            raise ProtocolError(f"cannot read the peer's arena: {error}") from error
        if plan is not None:
            for begin, goal in zip(sources, targets, strict=True):
                for at, to, num_bytes in plan.pieces:
                    source.copy(begin + at, arena, goal + to, num_bytes)
            return receiver.verify(unpacked, targets)
        start, target, length = sources[0], targets[0], 0
        for begin, goal in zip(sources, targets, strict=True):
            if begin != start + length or goal != target + length:
                source.copy(start, arena, target, length)
                start, target, length = begin, goal, 0
            length += size  # slices that are adjacent on both sides are copied in one call
        source.copy(start, arena, target, length)
        return receiver.verify(unpacked, targets, accept_deferred=True)


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


def supports_native(arena: Arena) -> bool:
    """Whether the kernels support slices of this size."""
    return arena.slice_bytes >= MIN_SLICE_BYTES and arena.slice_bytes % STRIPE_BYTES == 0


def fastest_copier(arena: Arena, calls: SliceCalls | None) -> SliceCopier:
    """Returns a copier with native kernels, if these exist and support this arena's slices, or else
    one in Python."""
    if calls is not None and supports_native(arena):
        return NativeSliceCopier(calls)
    return PlainSliceCopier()


class NativeSliceCopier:
    """Copies and hashes by `slices.cpp`, without the GIL. Copies slices of arenas for which
    `supports_native` is True."""

    group_bytes = NATIVE_GROUP_BYTES

    def __init__(self, calls: SliceCalls) -> None:
        self._calls = calls
        self._plain = PlainSliceCopier()
        self.checksum: Checksum = self._plain.checksum

    def fill_checksums(
        self, arena: Arena, offers: bytearray, start: int, end: int, most_bytes: int
    ) -> int:
        """Raises ValueError for an offer outside the arena."""
        if _are_few(end - start, arena):
            return self._plain.fill_checksums(arena, offers, start, end, most_bytes)
        base, num_filled = _address(arena.buffer), array("q", (0,))
        first = _address(offers)
        code = self._calls.name(
            ctypes.addressof(first) + start * OFFER.size,
            end - start,
            ctypes.addressof(base),
            arena.checksums.address,
            arena.num_blocks,
            arena.layout.num_layers,
            arena.slice_bytes,
            most_bytes,
            num_filled.buffer_info()[0],
        )
        if code != _DONE:
            raise ValueError("a slice to be sent is outside the arena")
        return start + num_filled[0]

    def send(
        self, frames: FrameSocket, body: bytes, offers: bytes, arena: Arena, deadline_s: float
    ) -> None:
        """Raises PeerGoneError if the connection breaks, and DeadlineError if the peer takes
        nothing until then."""
        count = len(offers) // OFFER.size
        if _are_few(count, arena):
            self._plain.send(frames, body, offers, arena, deadline_s)
            return
        head, base = frames.take_frame(body), _address(arena.buffer)
        state, timeout_text = array("q", (0, 0)), ""
        while True:
            frames.set_timeout(deadline_s, timeout_text)
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
            timeout_text = "the peer accepted no data before the deadline"

    def receive(
        self, frames: FrameSocket, offers: bytes, receiver: SliceReceiver, deadline_s: float
    ) -> int:
        """Raises ProtocolError for slices that are not expected, PeerGoneError if the connection
        ends, and DeadlineError."""
        arena, count = receiver.arena, len(offers) // OFFER.size
        if receiver.reshard_plan is not None or _are_few(count, arena):
            return self._plain.receive(frames, offers, receiver, deadline_s)
        base = _address(arena.buffer)
        packed = _packed(receiver, base)
        read_ahead = frames.take_read_ahead(count * arena.slice_bytes)
        self._copy_read_ahead(read_ahead, offers, receiver)
        state, timeout_text = array("q", (len(read_ahead), 0, 0, 0)), ""
        while True:
            frames.set_timeout(deadline_s, timeout_text)
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
                raise self._failure(code, state[3], offers, receiver)
            timeout_text = "the peer sent nothing before the deadline"

    def copy(self, source: PeerArena, offers: bytes, receiver: SliceReceiver) -> int:
        """Raises ProtocolError for slices outside the peer's arena or not expected."""
        if receiver.reshard_plan is not None:
            return self._plain.copy(source, offers, receiver)
        base, corrupt = _address(receiver.arena.buffer), array("q", (0,))
        code = self._calls.copy(
            offers,
            len(offers) // OFFER.size,
            _packed(receiver, base),
            source.address,
            source.num_blocks,
            corrupt.buffer_info()[0],
        )
        if code == _DONE:
            return corrupt[0]
        # repeats the copy in Python to raise the exact error
        self._plain.copy(source, offers, receiver)
        raise ProtocolError("slices were offered that cannot exist")

    def _copy_read_ahead(
        self, read_ahead: memoryview, offers: bytes, receiver: SliceReceiver
    ) -> None:
        """Copies the start of the slices, which the socket has read together with the message."""
        if not read_ahead:
            return
        size, buffer = receiver.arena.slice_bytes, receiver.arena.buffer
        first = unpack_offers(offers[: -(-len(read_ahead) // size) * OFFER.size])
        for number, offset in enumerate(receiver.offsets(first)):
            part = read_ahead[number * size : (number + 1) * size]
            buffer[offset : offset + len(part)] = part

    def _failure(
        self, code: int, errno: int, offers: bytes, receiver: SliceReceiver
    ) -> TransportError:
        if code == _OUTSIDE:
            receiver.offsets(unpack_offers(offers))  # unpacks the offers to raise the exact error
        if code == _CLOSED:
            return PeerGoneError("the peer closed the connection")
        return PeerGoneError(f"the connection broke: {os.strerror(errno)}")


def _are_few(count: int, arena: Arena) -> bool:
    return count <= FEW_SLICES and count * arena.slice_bytes <= FEW_BYTES


def _address(memory: memoryview | bytearray) -> ctypes.c_char:
    """Keeps the memory at its address as long as the result lives."""
    return ctypes.c_char.from_buffer(memory)


def _packed(receiver: SliceReceiver, base: ctypes.c_char) -> bytes:
    arena = receiver.arena
    return _TABLE.pack(
        ctypes.addressof(base),
        receiver.blocks.buffer_info()[0],
        arena.checksums.address,
        ctypes.addressof(_address(receiver.states)),
        receiver.first_index,
        len(receiver.blocks),
        receiver.num_layers,
        arena.slice_bytes,
    )
