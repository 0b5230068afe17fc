"""What the driver of a soak and its instances say to each other, besides the head's own words."""

from __future__ import annotations

import socket
from typing import Literal

import msgspec

from moonpool.kvcache.transfers import PeerAddress
from moonpool.types import BlockKey, Struct
from moonpool.workers.messages import Command, InstanceLoad, Report

MAX_MESSAGE_BYTES = 1 << 20


class Plan(Struct, frozen=True, tag=True):
    """What an instance is to be. `flipped`: slots of its folder that hold a flip already."""

    instance_id: str
    secret: bytes
    folder: str
    num_blocks: int
    num_slots: int
    eviction: str
    seed: int
    flipped: tuple[int, ...] = ()


class FlipMemory(Struct, frozen=True, tag=True):
    """Flip a bit of this block in DRAM, if it is idle and its checksums are known."""

    key: BlockKey


class FlipDisk(Struct, frozen=True, tag=True):
    """Flip a bit of this block on the SSD, if nobody reads it now."""

    key: BlockKey


class FillDisk(Struct, frozen=True, tag=True):
    """Until told otherwise, the disk is full (or is not)."""

    full: bool


class HangDisk(Struct, frozen=True, tag=True):
    """For so long, the disk gives neither an answer nor an error."""

    seconds: float


class Check(Struct, frozen=True, tag=True):
    """Look at everything, and answer with `Checked`."""


class Stop(Struct, frozen=True, tag=True):
    pass


class Joined(Struct, frozen=True, tag=True):
    address: PeerAddress
    num_adopted: int


class Flipped(Struct, frozen=True, tag=True):
    """The answer to a flip; `slot`: of one on the SSD."""

    done: bool
    slot: int = -1


class FlipFound(Struct, frozen=True, tag=True):
    """A load met a flipped slot, and failed there (`read`: because of it). Or the slot is being
    written anew, and until that has ended well, nobody knows; then the flip is gone."""

    slot: int
    read: bool
    state: Literal["there", "unknown", "gone"]


class Checked(Struct, frozen=True, tag=True):
    """`wrong`: one line for each named block whose bytes are not what its name says and would be
    taken for right."""

    load: InstanceLoad
    wrong: tuple[str, ...]
    num_checked: int
    num_works: int
    num_fds: int
    num_threads: int
    rss_bytes: int


class Tally(Struct, frozen=True, tag=True):
    """Counters of this life so far."""

    counters: dict[str, float]


class Wrong(Struct, frozen=True, tag=True):
    """A promise is broken; the soak ends."""

    message: str


Down = Plan | Command | FlipMemory | FlipDisk | FillDisk | HangDisk | Check | Stop
Up = Report | Joined | Flipped | FlipFound | Checked | Tally | Wrong

_ENCODER = msgspec.msgpack.Encoder()
_DOWN: msgspec.msgpack.Decoder[Down] = msgspec.msgpack.Decoder(Down)
_UP: msgspec.msgpack.Decoder[Up] = msgspec.msgpack.Decoder(Up)


def send(sock: socket.socket, message: Down | Up) -> None:
    sock.send(_ENCODER.encode(message))


def receive_down(sock: socket.socket) -> Down | None:
    """None at the end."""
    data = sock.recv(MAX_MESSAGE_BYTES)
    return _DOWN.decode(data) if data else None


def receive_up(sock: socket.socket) -> Up | None:
    data = sock.recv(MAX_MESSAGE_BYTES)
    return _UP.decode(data) if data else None
