"""The head's end of its connection to the supervisor, which holds what shall outlive the head."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from moonpool.api.connection.call_log import CallLog
from moonpool.api.connection.half_read import HalfRead
from moonpool.api.connection.kept_stream import MAX_KEPT_SHARE, KeptStream
from moonpool.api.sharing.shared_buffer import SharedBuffer, party_at
from moonpool.cores import CoreShare
from moonpool.log_limit import limited_logger
from moonpool.protocol.supervision import (
    CutAnswer,
    DropAnswer,
    FinishHead,
    FromHead,
    HandOver,
    HeadBeat,
    HeadBegin,
    HeadEnding,
    HeadFailed,
    HeadLoaded,
    HeadPrepared,
    HeadUp,
    InstancesKnown,
    KeepAnswer,
    KeepCutAnswer,
    KillWorker,
    PassConnection,
    ReplaceWorker,
    TakeAnswer,
    TakeConnection,
    TakeCutAnswer,
    TakeNoMore,
    ToHead,
    UpgradeFailed,
    UpgradeWanted,
)
from moonpool.runtime.packets import PacketSocket
from moonpool.types import InstanceId, Role

log = limited_logger("moonpool.head")

BEAT_S = 5.0
FLUSH_S, FLUSH_LOOK_S = 5.0, 0.01
MAX_KEPT = 4096
MAX_LOG_BYTES = 512 << 20
"""Most bytes of the logs of all answers."""


@dataclass
class Inheritance:
    """What the supervisor gives to a head."""

    begin: HeadBegin
    http: socket.socket
    control: socket.socket
    answers: list[tuple[KeptStream | HalfRead, socket.socket]] = field(default_factory=list)
    connections: list[socket.socket] = field(default_factory=list)
    cut_answers: list[KeptStream] = field(default_factory=list)
    """Answers whose clients have lost their connections and may come back."""


class SupervisorLink:
    """Made on the running loop. `stop` is set when the head shall end in order, or hand over."""

    def __init__(self, sock: socket.socket) -> None:
        self.stop = asyncio.Event()
        self.hands_over = False
        self.upgrade_error: str | None = None
        """Why the last upgrade was called off."""
        self._inherited: asyncio.Future[Inheritance] = asyncio.get_running_loop().create_future()
        self._inheritance: Inheritance | None = None
        self._next_number = 0
        self._kept: dict[int, str] = {}  # -> party
        self._num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        by_files = MAX_KEPT
        if self._num_files != resource.RLIM_INFINITY:
            by_files = self._num_files // MAX_KEPT_SHARE
        self._places = SharedBuffer(min(MAX_KEPT, by_files))
        self._log_bytes = SharedBuffer(MAX_LOG_BYTES)
        self._packets: PacketSocket[ToHead, FromHead] = PacketSocket(
            sock, msgspec.msgpack.Decoder(ToHead), self._on_packet, self._on_end
        )

    async def inherit(self) -> Inheritance:
        """Waits for what an earlier head has left."""
        return await self._inherited

    def loaded(self) -> None:
        self._packets.send(HeadLoaded())

    def replace(self, instance_id: InstanceId) -> None:
        self._packets.send(ReplaceWorker(instance_id=instance_id))

    def upgrade(self) -> None:
        self.upgrade_error = None
        self._packets.send(UpgradeWanted())

    def pass_on(self, socket_fd: int) -> None:
        """Gives the next head a connection on which no call is under way."""
        self._packets.send(PassConnection(), (socket_fd,))

    async def flush(self) -> None:
        """Returns when everything is sent, after FLUSH_S at the latest."""
        for _ in range(int(FLUSH_S / FLUSH_LOOK_S)):
            if not self._packets.num_pending:
                return
            await asyncio.sleep(FLUSH_LOOK_S)

    def prepared(self, shares: Sequence[CoreShare], threads: int) -> None:
        cores = tuple((share.engine, share.others) for share in shares)
        self._packets.send(HeadPrepared(cores=cores, threads=threads))

    def up(self) -> None:
        self._packets.send(HeadUp())

    def failed(self, message: str) -> None:
        self._packets.send(HeadFailed(message=message))

    def ending(self) -> None:
        self._packets.send(HeadEnding())

    def kill(self, instance_id: InstanceId) -> None:
        self._packets.send(KillWorker(instance_id=instance_id))

    def know(self, roles: dict[InstanceId, Role]) -> None:
        """Tells which instances a further head should wait for."""
        self._packets.send(InstancesKnown(roles=roles))

    async def beat(self) -> None:
        """Lets the supervisor know that this loop turns, until it is cancelled."""
        while True:
            self._packets.send(HeadBeat())
            await asyncio.sleep(BEAT_S)

    def close(self) -> None:
        self._packets.close()

    # The keeper of streams

    def keep(self, socket_fd: int, log_fd: int, party: str) -> int | None:
        return self._keep(KeepAnswer(number=self._next_number), (socket_fd, log_fd), party)

    def keep_cut(self, log_fd: int, party: str) -> int | None:
        return self._keep(KeepCutAnswer(number=self._next_number), (log_fd,), party)

    def _keep(
        self, packet: KeepAnswer | KeepCutAnswer, fds: Sequence[int], party: str
    ) -> int | None:
        if not self._places.has_room(party):
            self._warn_of_full(party)
            return None
        self._next_number += 1
        if not self._packets.send(packet, fds):
            return None
        self._note_kept(packet.number, party)
        return packet.number

    def _note_kept(self, number: int, party: str) -> None:
        self._kept[number] = party
        self._places.add(party, 1)

    def _warn_of_full(self, party: str) -> None:
        """Names the limit that was reached."""
        most = self._places.capacity
        why = f"MAX_KEPT is {MAX_KEPT}"
        if most < MAX_KEPT:
            why = f"a {MAX_KEPT_SHARE}th of the {self._num_files} file descriptors (ulimit -Hn)"
        log.warning(
            "%d answers are kept, %d of them for one client, of at most %d (%s): further ones would"
            " end with the head",
            self._places.taken,
            self._places.taken_by(party),
            most,
            why,
        )

    def cut(self, number: int) -> None:
        self._packets.send(CutAnswer(number=number))

    def drop(self, number: int) -> None:
        party = self._kept.pop(number, None)
        if party is not None:
            self._places.release(party)
        self._packets.send(DropAnswer(number=number))

    def take_memory(self, num_bytes: int, party: str) -> bool:
        return self._log_bytes.take(party, num_bytes)

    def release_memory(self, num_bytes: int, party: str) -> None:
        self._log_bytes.release(party, num_bytes)

    # Packets

    def _on_packet(self, packet: ToHead, fds: Sequence[int]) -> None:
        match packet:
            case HeadBegin():
                http, control = (socket.socket(fileno=fd) for fd in fds)
                self._inheritance = Inheritance(packet, http, control)
            case TakeAnswer():
                self._take(packet.number, *fds)
            case TakeCutAnswer():
                self._take_cut(packet.number, fds[0])
            case TakeNoMore():
                assert self._inheritance is not None
                self._next_number = packet.next_number
                self._forget_kept_twice(self._inheritance)
                self._inherited.set_result(self._inheritance)
            case TakeConnection():
                assert self._inheritance is not None
                self._inheritance.connections.append(socket.socket(fileno=fds[0]))
            case UpgradeFailed():
                self.upgrade_error = packet.message
            case HandOver():
                self.hands_over = True
                self.stop.set()
            case FinishHead():
                self.hands_over = False
                self.stop.set()

    def _take(self, number: int, socket_fd: int, log_fd: int) -> None:
        assert self._inheritance is not None
        sock = socket.socket(fileno=socket_fd)
        call_log = CallLog(self, number, log_fd)
        received: HalfRead | KeptStream
        try:
            call_log.read()
            if HalfRead.is_in(call_log):
                received = HalfRead.take_over(call_log, party_at(sock))
            else:
                received = KeptStream.take_over(call_log)
        except (ValueError, OSError) as error:
            log.warning("an answer cannot go on: %s", error)
            call_log.drop()
            sock.close()
            return
        self._note_kept(number, call_log.party)
        self._inheritance.answers.append((received, sock))

    def _take_cut(self, number: int, log_fd: int) -> None:
        assert self._inheritance is not None
        call_log = CallLog(self, number, log_fd)
        try:
            call_log.read()
            self._inheritance.cut_answers.append(KeptStream.take_cut(call_log))
            self._note_kept(number, call_log.party)
        except (ValueError, OSError) as error:
            log.warning("an answer must be computed again if its client comes back: %s", error)
            call_log.drop()

    def _forget_kept_twice(self, inheritance: Inheritance) -> None:
        """A head may end after it has kept a call, and before it drops what had arrived of it."""
        kept = {_inode(sock) for log, sock in inheritance.answers if isinstance(log, KeptStream)}
        for each in list(inheritance.answers):
            received, sock = each
            if isinstance(received, HalfRead) and _inode(sock) in kept:
                inheritance.answers.remove(each)
                received.drop()
                sock.close()

    def _on_end(self) -> None:
        os._exit(1)  # the supervisor is gone, and with it everything that could go on


def _inode(sock: socket.socket) -> int:
    return os.fstat(sock.fileno()).st_ino
