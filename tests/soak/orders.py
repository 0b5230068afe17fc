"""Defines the messages between the driver of a soak and its instances, in addition to the
protocol's."""

from __future__ import annotations

import socket
from typing import Literal

import msgspec

from moonpool.protocol.messages import Command, InstanceLoad, Report
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.types import BlockKey, Struct

MAX_MESSAGE_BYTES = 1 << 20


class Plan(Struct, frozen=True, tag=True):
    """The configuration of an instance. `flipped` lists the slots of its folder that have a flipped
    bit."""

    instance_id: str
    secret: bytes
    folder: str
    num_blocks: int
    num_slots: int
    eviction: str
    seed: int
    flipped: tuple[int, ...] = ()


class FlipMemory(Struct, frozen=True, tag=True):
    """Orders a flipped bit in this block in DRAM if the block is idle and its checksums are
    known."""

    key: BlockKey


class FlipDisk(Struct, frozen=True, tag=True):
    """Orders a flipped bit in this block on the SSD if no read of the block is in progress."""

    key: BlockKey


class FillDisk(Struct, frozen=True, tag=True):
    """Makes the disk full, or empties it again."""

    full: bool


class HangDisk(Struct, frozen=True, tag=True):
    """Lets the disk hang for this time: it returns neither data nor an error."""

    seconds: float


class Check(Struct, frozen=True, tag=True):
    """Orders a check of all blocks; the answer is `Checked`."""


class Stop(Struct, frozen=True, tag=True):
    pass


class Joined(Struct, frozen=True, tag=True):
    address: PeerAddress
    num_adopted: int


class Flipped(Struct, frozen=True, tag=True):
    """Answers a flip; `slot` is set for a flip on the SSD."""

    done: bool
    slot: int = -1


class FlipFound(Struct, frozen=True, tag=True):
    """Reports that a load failed at a flipped slot (with `read`, because of the flip), or that a
    write overwrites the slot. The flip is gone only after that write has succeeded; until then its
    state is unknown."""

    slot: int
    read: bool
    state: Literal["there", "unknown", "gone"]


class Checked(Struct, frozen=True, tag=True):
    """`wrong` has one line for each cached block whose bytes do not match its key and would pass
    its checks."""

    load: InstanceLoad
    wrong: tuple[str, ...]
    num_checked: int
    num_attempts: int
    num_fds: int
    num_threads: int
    rss_bytes: int


class Tally(Struct, frozen=True, tag=True):
    """The counters of this incarnation."""

    counters: dict[str, float]


class Wrong(Struct, frozen=True, tag=True):
    """Reports a violated invariant; the soak ends."""

    message: str


Down = Plan | Command | FlipMemory | FlipDisk | FillDisk | HangDisk | Check | Stop
Up = Report | Joined | Flipped | FlipFound | Checked | Tally | Wrong

_ENCODER = msgspec.msgpack.Encoder()
_DOWN: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)
_UP: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)


def send(sock: socket.socket, message: Down | Up) -> None:
    sock.send(_ENCODER.encode(message))


def receive_down(sock: socket.socket) -> Down | None:
    """Returns the next message, or None when the connection ends."""
    data = sock.recv(MAX_MESSAGE_BYTES)
    return _DOWN.decode(data) if data else None


def receive_up(sock: socket.socket) -> Up | None:
    data = sock.recv(MAX_MESSAGE_BYTES)
    return _UP.decode(data) if data else None
