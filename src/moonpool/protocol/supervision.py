"""The messages between the supervisor and the head that it starts.

    supervisor                                                head
      | -- HeadBegin (configuration, listening sockets) -----> |
      | -- AdoptStream (one answer of an earlier head) ------> |  for each
      | -- AdoptDetachedStream (its connection has ended) ---> |  for each
      | -- AllStreamsSent -----------------------------------> |
      | <-- NoteWork (where it says what it works on) -------- |
      | <-- HeadPrepared (the configuration is right) -------- |
      |   starts the workers, unless they run                  |
      | <-- HeadUp ------------------------------------------- |  serves
      | <-- HeadBeat, InstancesKnown, KillWorker ------------- |
      | -- WorkerCrashed (it ended by itself) -------------> |
      | <-- StreamOpened, StreamDetached, StreamClosed, HeadsEnded -- |
      | -- FinishHead (a signal came) -----------------------> |
      | <-- HeadEnding --------------------------------------- |  then it stops the workers

An upgrade replaces the head, and the program of the supervisor (`head.succession`):

      | <-- ReplaceWorker (the next one from the disk) ------- |  for each, when it leaves
      | <-- UpgradeWanted ------------------------------------ |
      |   starts the next head, which sends HeadLoaded         |
      | -- UpgradeFailed (why), or HandOver -----------------> |
      | <-- PassConnection (a client without a call) --------- |  for each, then the head ends
      | -- HeadBegin, TakeConnection, as above --------------> |  to the next head

Each message is one packet of a Unix socket, with file descriptors if its docstring says so.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec

from moonpool.config.tables import Config
from moonpool.protocol.model_offer import ModelOffer
from moonpool.types import InstanceId, Role, Struct

HUNG_STATUS = 70
"""The exit status of a worker whose engine hangs."""


class Packet(Struct, frozen=True):
    """`num_fds`: the number of file descriptors that come with it."""

    num_fds: ClassVar[int] = 0


class HeadsEnded(Packet, frozen=True, tag=True):
    """A call has hung or crashed `count` heads: this counts for calls like it, too. `digest`: the
    digest of the call's path and body."""

    tenant: str
    digest: bytes
    count: int
    since_s: float  # a time on the machine's monotonic clock


class HeadBegin(Packet, frozen=True, tag=True):
    """The first message, with two listening sockets: of HTTP, and of the control connections.

    `launch`: whether the supervisor starts the workers. `num_restarts`: number of earlier heads
    that died. `num_upgrades`: number of earlier heads that handed over. `expected`: the instances
    of the previous head, and `offers`: the models of those that are vLLM servers.
    """

    num_fds: ClassVar[int] = 2
    config: Config
    secret: bytes
    launch: bool
    num_restarts: int
    expected: dict[InstanceId, Role]
    num_upgrades: int = 0
    epoch: int = 1  # epoch of the head; a standby that takes over adds one
    ended: tuple[HeadsEnded, ...] = ()  # recent calls that ended heads
    offers: dict[InstanceId, ModelOffer] = msgspec.field(default_factory=dict)

    @property
    def is_first(self) -> bool:
        """Whether there was no head before."""
        return not self.num_restarts and not self.num_upgrades


class AdoptStream(Packet, frozen=True, tag="TakeAnswer"):
    """Continue an answer; comes with the client's socket and the log. `num_ended`: number of heads
    that its call has hung or crashed. `num_killed`: number of heads that were killed while they
    processed it."""

    num_fds: ClassVar[int] = 2
    number: int
    num_ended: int = 0
    num_killed: int = 0


class AdoptDetachedStream(Packet, frozen=True, tag="TakeCutAnswer"):
    """The connection of this answer has ended, and its client may come back; comes with the log.
    `num_ended`: the same number as in `AdoptStream`."""

    num_fds: ClassVar[int] = 1
    number: int
    num_ended: int = 0


class TakeConnection(Packet, frozen=True, tag=True):
    """Serve this connection, on which no call is under way; with its socket."""

    num_fds: ClassVar[int] = 1


class AllStreamsSent(Packet, frozen=True, tag="TakeNoMore"):
    """Tells that all answers of earlier heads have been sent."""

    next_number: int  # number of the first answer that this head keeps


class WorkerCrashed(Packet, frozen=True, tag=True):
    """Tells that a worker has ended without being killed from outside."""

    instance_id: InstanceId


class FinishHead(Packet, frozen=True, tag=True):
    """Tells the head to end in an orderly way."""


class HandOver(Packet, frozen=True, tag=True):
    """Tells the head to accept no more connections, pass on those without a call, and end, because
    another head continues."""


class UpgradeFailed(Packet, frozen=True, tag=True):
    """The code on disk cannot continue; the text is one line for the user."""

    message: str


class HeadLoaded(Packet, frozen=True, tag=True):
    """The head has imported its modules, and waits for HeadBegin."""


class NoteWork(Packet, frozen=True, tag=True):
    """Shows which call the head works on; comes with the file in memory of a `WorkMark`."""

    num_fds: ClassVar[int] = 1


class HeadPrepared(Packet, frozen=True, tag=True):
    """The head is able to start. `cores` are the cores of each worker's engine and of its other
    threads; if empty, workers are not pinned."""

    cores: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]
    threads: int  # number of threads of each worker process


class HeadUp(Packet, frozen=True, tag=True):
    """The head serves."""


class HeadBeat(Packet, frozen=True, tag=True):
    """The head's event loop turns."""


class HeadFailed(Packet, frozen=True, tag=True):
    """The head cannot start; one line for the user."""

    message: str


class KillWorker(Packet, frozen=True, tag=True):
    """Asks to kill the process of a worker that does not respond."""

    instance_id: InstanceId


class ReplaceWorker(Packet, frozen=True, tag=True):
    """Asks to start another worker in place of this one, which is about to leave. `from_disk`:
    whether the new worker runs the code on disk, which may differ from that of the other
    workers."""

    instance_id: InstanceId
    from_disk: bool = True


class UpgradeWanted(Packet, frozen=True, tag=True):
    """Asks to replace supervisor and head by processes that run the code on disk."""


class PassConnection(Packet, frozen=True, tag=True):
    """A connection for the next head, on which no call is under way; with its socket."""

    num_fds: ClassVar[int] = 1


class InstancesKnown(Packet, frozen=True, tag=True):
    """The instances that a further head should wait for, and the models of vLLM servers."""

    roles: dict[InstanceId, Role]
    offers: dict[InstanceId, ModelOffer] = msgspec.field(default_factory=dict)


class StreamOpened(Packet, frozen=True, tag="KeepAnswer"):
    """Hold this answer; comes with the client's socket and the log."""

    num_fds: ClassVar[int] = 2
    number: int


class DetachedStreamOpened(Packet, frozen=True, tag="KeepCutAnswer"):
    """Hold this answer, whose connection ends with this head; comes with the log."""

    num_fds: ClassVar[int] = 1
    number: int


class StreamDetached(Packet, frozen=True, tag="CutAnswer"):
    """The connection of this answer has ended. The supervisor keeps only its log."""

    number: int


class StreamClosed(Packet, frozen=True, tag="DropAnswer"):
    """The answer is complete, or its client did not come back."""

    number: int


class TakeHead(Packet, frozen=True, tag=True):
    """Gives a front a connection to a head."""

    num_fds: ClassVar[int] = 1


class TakeFront(Packet, frozen=True, tag=True):
    """Gives the head a connection to a front. `number`: the place of the front."""

    num_fds: ClassVar[int] = 1
    number: int


class HeadEnding(Packet, frozen=True, tag=True):
    """The head ends in an orderly way, and stops the workers."""


class HeldState(Struct, frozen=True):
    """The state that the supervisor holds for one process that answers calls. `connections`,
    `answers` and `cut_answers` have numbers of file descriptors. `ended`: for each answer, how many
    heads its call has ended, and how many were killed while processing it."""

    answers: dict[int, tuple[int, int]] = msgspec.field(default_factory=dict)
    cut_answers: dict[int, int] = msgspec.field(default_factory=dict)
    ended: dict[int, tuple[int, int]] = msgspec.field(default_factory=dict)
    connections: tuple[int, ...] = ()
    next_number: int = 0

    @property
    def fds(self) -> list[int]:
        pairs = [fd for pair in self.answers.values() for fd in pair]
        return [*pairs, *self.cut_answers.values(), *self.connections]


class SupervisorState(HeldState, frozen=True, kw_only=True):
    """The state that a supervisor passes to its next program, which has the same process id and
    children; the fields of `HeldState` are held for the head.

    Numbers of file descriptors are also `http`, `control`, `head_fd`, and those in `memory`.
    `workers`: their process ids; 0 stands for a worker that is yet to be started. A further field
    needs a default: the next release reads what this one has written.
    """

    title: str  # the command line to show in process lists
    config: Config
    secret: bytes
    launch: bool
    http: int
    control: int
    expected: dict[InstanceId, Role]
    num_restarts: int
    num_upgrades: int
    head_pid: int  # process id of the next head, which waits
    head_fd: int
    prepared: HeadPrepared | None
    workers: dict[str, int]
    memory: dict[str, tuple[int, int]]
    epoch: int = 1
    offers: dict[InstanceId, ModelOffer] = msgspec.field(default_factory=dict)
    listed: dict[str, tuple[Role, str]] = msgspec.field(default_factory=dict)
    """Role and address of each vLLM server that a source lists, by name."""
    fronts: tuple[HeldState, ...] = ()
    """The state that is held for each front."""

    @property
    def fds(self) -> list[int]:
        """Returns all file descriptors of the state."""
        found = [*super().fds, self.http, self.control, self.head_fd]
        found += [fd for front in self.fronts for fd in front.fds]
        return found + [fd for pair in self.memory.values() for fd in pair]


ToHead = (
    HeadBegin
    | AdoptStream
    | AdoptDetachedStream
    | TakeConnection
    | AllStreamsSent
    | WorkerCrashed
    | TakeHead
    | TakeFront
    | FinishHead
    | HandOver
    | UpgradeFailed
)
FromHead = (
    HeadLoaded
    | NoteWork
    | HeadsEnded
    | HeadPrepared
    | ReplaceWorker
    | UpgradeWanted
    | PassConnection
    | HeadUp
    | HeadBeat
    | HeadFailed
    | KillWorker
    | InstancesKnown
    | StreamOpened
    | DetachedStreamOpened
    | StreamDetached
    | StreamClosed
    | HeadEnding
)
