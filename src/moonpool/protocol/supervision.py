"""The messages between the supervisor and the head that it starts.

    supervisor                                                head
      | -- HeadBegin (configuration, listening sockets) -----> |
      | -- TakeAnswer (one answer of an earlier head) -------> |  for each
      | -- TakeNoMore ---------------------------------------> |
      | <-- HeadPrepared (the configuration is right) -------- |
      |   starts the workers, unless they run                  |
      | <-- HeadUp ------------------------------------------- |  serves
      | <-- HeadBeat, InstancesKnown, KillWorker ------------- |
      | <-- KeepAnswer, DropAnswer --------------------------- |
      | -- FinishHead (a signal came) -----------------------> |
      | <-- HeadEnding --------------------------------------- |  then it stops the workers

Each is one packet of a Unix socket, with file descriptors where the text says so.
"""

from __future__ import annotations

from typing import ClassVar

from moonpool.config import Config
from moonpool.types import InstanceId, Role, Struct


class Packet(Struct, frozen=True):
    """`num_fds`: how many file descriptors come with it."""

    num_fds: ClassVar[int] = 0


class HeadBegin(Packet, frozen=True, tag=True):
    """The first message, with two listening sockets: of HTTP, and of the control connections.

    `launch`: the supervisor starts the workers. `num_restarts`: earlier heads that died.
    `expected`: the instances that the one before had.
    """

    num_fds: ClassVar[int] = 2
    config: Config
    secret: bytes
    launch: bool
    num_restarts: int
    expected: dict[InstanceId, Role]


class TakeAnswer(Packet, frozen=True, tag=True):
    """Go on with an answer; with the client's socket, and the log."""

    num_fds: ClassVar[int] = 2
    number: int


class TakeNoMore(Packet, frozen=True, tag=True):
    """There are no more answers to go on with."""

    next_number: int  # of the first answer that this head keeps


class FinishHead(Packet, frozen=True, tag=True):
    """End in order."""


class HeadPrepared(Packet, frozen=True, tag=True):
    """The head could start. `cores` are those of each worker's engine and of its other threads; if
    empty, workers are not pinned."""

    cores: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    threads: int  # of each worker process


class HeadUp(Packet, frozen=True, tag=True):
    """The head serves."""


class HeadBeat(Packet, frozen=True, tag=True):
    """The head's event loop turns."""


class HeadFailed(Packet, frozen=True, tag=True):
    """The head cannot start; one line for the user."""

    message: str


class KillWorker(Packet, frozen=True, tag=True):
    """A worker does not respond."""

    instance_id: InstanceId


class InstancesKnown(Packet, frozen=True, tag=True):
    """The instances that a further head should wait for."""

    roles: dict[InstanceId, Role]


class KeepAnswer(Packet, frozen=True, tag=True):
    """Hold this answer; with the client's socket, and the log."""

    num_fds: ClassVar[int] = 2
    number: int


class DropAnswer(Packet, frozen=True, tag=True):
    """The answer is complete."""

    number: int


class HeadEnding(Packet, frozen=True, tag=True):
    """The head ends in order, and stops the workers."""


ToHead = HeadBegin | TakeAnswer | TakeNoMore | FinishHead
FromHead = (
    HeadPrepared
    | HeadUp
    | HeadBeat
    | HeadFailed
    | KillWorker
    | InstancesKnown
    | KeepAnswer
    | DropAnswer
    | HeadEnding
)
