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
from moonpool.cores import CoreShare
from moonpool.log_limit import limited_logger
from moonpool.protocol.model_offer import ModelOffer
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
        self._kept: set[int] = set()
        self._num_log_bytes = 0
        hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        self._most_kept = MAX_KEPT
        if hard_limit != resource.RLIM_INFINITY:
            self._most_kept = min(MAX_KEPT, hard_limit // MAX_KEPT_SHARE)
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

    def know(self, roles: dict[InstanceId, Role], offers: dict[InstanceId, ModelOffer]) -> None:
        """Tells which instances a further head should wait for, and the models of vLLM servers."""
        self._packets.send(InstancesKnown(roles=roles, offers=offers))

    async def beat(self) -> None:
        """Lets the supervisor know that this loop turns, until it is cancelled."""
        while True:
            self._packets.send(HeadBeat())
            await asyncio.sleep(BEAT_S)

    def close(self) -> None:
        self._packets.close()

    # The keeper of streams

    def keep(self, socket_fd: int, log_fd: int) -> int | None:
        if len(self._kept) >= self._most_kept:
            log.warning("more than %d answers at a time: some would end with the head", MAX_KEPT)
            return None
        return self._keep(KeepAnswer(number=self._next_number), (socket_fd, log_fd))

    def keep_cut(self, log_fd: int) -> int | None:
        if len(self._kept) >= self._most_kept:
            return None
        return self._keep(KeepCutAnswer(number=self._next_number), (log_fd,))

    def _keep(self, packet: KeepAnswer | KeepCutAnswer, fds: Sequence[int]) -> int | None:
        self._next_number += 1
        if not self._packets.send(packet, fds):
            return None
        self._kept.add(packet.number)
        return packet.number

    def cut(self, number: int) -> None:
        self._packets.send(CutAnswer(number=number))

    def drop(self, number: int) -> None:
        self._kept.discard(number)
        self._packets.send(DropAnswer(number=number))

    def take_memory(self, num_bytes: int) -> bool:
        if self._num_log_bytes + num_bytes > MAX_LOG_BYTES:
            return False
        self._num_log_bytes += num_bytes
        return True

    def release_memory(self, num_bytes: int) -> None:
        self._num_log_bytes -= num_bytes

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
        self._kept.add(number)
        call_log = CallLog(self, number, log_fd)
        try:
            call_log.read()
            kind = HalfRead if HalfRead.is_in(call_log) else KeptStream
            received = kind.take_over(call_log)
        except (ValueError, OSError) as error:
            log.warning("an answer cannot go on: %s", error)
            call_log.drop()
            os.close(socket_fd)
            return
        self._inheritance.answers.append((received, socket.socket(fileno=socket_fd)))

    def _take_cut(self, number: int, log_fd: int) -> None:
        assert self._inheritance is not None
        self._kept.add(number)
        call_log = CallLog(self, number, log_fd)
        try:
            call_log.read()
            self._inheritance.cut_answers.append(KeptStream.take_cut(call_log))
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
