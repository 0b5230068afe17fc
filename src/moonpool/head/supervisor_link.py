"""The head's end of its connection to the supervisor, which holds all that must outlive the
head."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from moonpool.api.connection.call_log import CallLog
from moonpool.api.connection.kept_stream import MAX_KEPT_SHARE, HalfRead, KeptStream, accepted_bytes
from moonpool.api.connection.poison import (
    MAX_ENDED,
    Enders,
    WorkMark,
    late_error,
    poison_error,
    send_error,
)
from moonpool.api.errors import ApiError
from moonpool.api.messages import error_payload
from moonpool.api.sharing.shared_buffer import SharedBuffer, party_at
from moonpool.cores import CoreShare
from moonpool.link.packets import PacketSocket
from moonpool.log_limit import limited_logger
from moonpool.protocol.model_offer import ModelOffer
from moonpool.protocol.supervision import (
    AdoptDetachedStream,
    AdoptStream,
    AllStreamsSent,
    DetachedStreamOpened,
    FinishHead,
    FromHead,
    HandOver,
    HeadBeat,
    HeadBegin,
    HeadEnding,
    HeadFailed,
    HeadLoaded,
    HeadPrepared,
    HeadsEnded,
    HeadUp,
    InstancesKnown,
    KillWorker,
    NoteWork,
    PassConnection,
    ReplaceWorker,
    StreamClosed,
    StreamDetached,
    StreamOpened,
    TakeConnection,
    TakeFront,
    TakeHead,
    ToHead,
    UpgradeFailed,
    UpgradeWanted,
    WorkerCrashed,
)
from moonpool.types import InstanceId, Role

log = limited_logger("moonpool.head")

BEAT_S = 5.0
FLUSH_S, FLUSH_LOOK_S = 5.0, 0.01
MAX_KEPT = 4096
MAX_LOG_BYTES = 512 << 20
"""Most bytes of the logs of all answers."""


@dataclass
class Inheritance:
    """The state that the supervisor gives to a head."""

    begin: HeadBegin
    http: socket.socket
    control: socket.socket
    answers: list[tuple[KeptStream | HalfRead, socket.socket]] = field(default_factory=list)
    connections: list[socket.socket] = field(default_factory=list)
    cut_answers: list[KeptStream] = field(default_factory=list)
    """Answers whose clients have lost their connections and may come back."""


class SupervisorLink:
    """Must be made on the running loop. `stop` is set when the head must end in order, or hand
    over."""

    def __init__(self, sock: socket.socket) -> None:
        self.stop = asyncio.Event()
        self.hands_over = False
        self.upgrade_error: str | None = None
        """Why the last upgrade was called off."""
        self.heads: asyncio.Queue[socket.socket] = asyncio.Queue()
        """Connections to later heads, if this process is a front."""
        self.fronts: asyncio.Queue[tuple[int, socket.socket]] = asyncio.Queue()
        """The places of fronts, and connections to them, if this process is a head."""
        self._inherited: asyncio.Future[Inheritance] = asyncio.get_running_loop().create_future()
        self._inheritance: Inheritance | None = None
        self._next_number = 0
        self._kept: dict[int, str] = {}  # -> party
        self._num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        self._places = self._make_places(1)
        self._log_bytes = SharedBuffer(MAX_LOG_BYTES)
        self.enders = Enders()
        self.mark: WorkMark | None = None
        self.on_crash: Callable[[InstanceId], None] = lambda instance_id: None
        self._packets: PacketSocket[ToHead, FromHead] = PacketSocket(
            sock, msgspec.msgpack.Decoder(ToHead), self._on_packet, self._on_end
        )

    def _make_places(self, num_fronts: int) -> SharedBuffer:
        """Makes the places for kept answers. The supervisor holds the answers of all fronts."""
        if self._num_files == resource.RLIM_INFINITY:
            return SharedBuffer(MAX_KEPT)
        return SharedBuffer(min(MAX_KEPT, self._num_files // (MAX_KEPT_SHARE * num_fronts)))

    async def inherit(self) -> Inheritance:
        """Waits for the state that an earlier head has left."""
        return await self._inherited

    def loaded(self) -> None:
        self._packets.send(HeadLoaded())

    def replace(self, instance_id: InstanceId, from_disk: bool = True) -> None:
        self._packets.send(ReplaceWorker(instance_id=instance_id, from_disk=from_disk))

    def upgrade(self) -> None:
        self.upgrade_error = None
        self._packets.send(UpgradeWanted())

    def pass_on(self, socket_fd: int) -> None:
        """Gives the next head a connection that has no call under way."""
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
        """Tells the supervisor which instances a later head should wait for, and the models of vLLM
        servers."""
        self._packets.send(InstancesKnown(roles=roles, offers=offers))

    async def beat(self) -> None:
        """Lets the supervisor know that this loop turns, until it is cancelled."""
        while True:
            self._packets.send(HeadBeat())
            await asyncio.sleep(BEAT_S)

    def close(self) -> None:
        self._packets.close()

    # Methods of the keeper of streams

    def keep(self, socket_fd: int, log_fd: int, party: str) -> int | None:
        return self._keep(StreamOpened(number=self._next_number), (socket_fd, log_fd), party)

    def keep_cut(self, log_fd: int, party: str) -> int | None:
        return self._keep(DetachedStreamOpened(number=self._next_number), (log_fd,), party)

    def _keep(
        self, packet: StreamOpened | DetachedStreamOpened, fds: Sequence[int], party: str
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
        self._packets.send(StreamDetached(number=number))

    def drop(self, number: int) -> None:
        party = self._kept.pop(number, None)
        if party is not None:
            self._places.release(party)
        self._packets.send(StreamClosed(number=number))

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
                self._places = self._make_places(packet.config.api.fronts)
                self._note_work(packet)
            case AdoptStream():
                self._take(packet, *fds)
            case AdoptDetachedStream():
                self._take_cut(packet, fds[0])
            case AllStreamsSent():
                assert self._inheritance is not None
                self._next_number = packet.next_number
                self._forget_kept_twice(self._inheritance)
                self._inherited.set_result(self._inheritance)
            case TakeConnection():
                assert self._inheritance is not None
                self._inheritance.connections.append(socket.socket(fileno=fds[0]))
            case TakeHead():
                self.heads.put_nowait(socket.socket(fileno=fds[0]))
            case TakeFront():
                self.fronts.put_nowait((packet.number, socket.socket(fileno=fds[0])))
            case WorkerCrashed():
                self.on_crash(packet.instance_id)
            case UpgradeFailed():
                self.upgrade_error = packet.message
            case HandOver():
                self.hands_over = True
                self.stop.set()
            case FinishHead():
                self.hands_over = False
                self.stop.set()

    def _note_work(self, begin: HeadBegin) -> None:
        """Shows the supervisor which call is being processed, from now on."""
        for alike in begin.ended:
            self.enders.note(alike.tenant, alike.digest, alike.count, alike.since_s)
        fd = WorkMark.make_memory()
        self.mark = WorkMark(fd)
        self._packets.send(NoteWork(), (fd,))
        os.close(fd)

    def _take(self, packet: AdoptStream, socket_fd: int, log_fd: int) -> None:
        assert self._inheritance is not None
        sock = socket.socket(fileno=socket_fd)
        call_log = CallLog(self, packet.number, log_fd)
        received: HalfRead | KeptStream
        try:
            call_log.read()
            ends = packet.num_ended, packet.num_killed
            if HalfRead.is_in(call_log):
                received = HalfRead.take_over(call_log, party_at(sock), *ends)
            else:
                received = KeptStream.take_over(call_log, *ends)
        except (ValueError, OSError) as error:
            log.warning("an answer cannot go on: %s", error)
            call_log.drop()
            sock.close()
            return
        self._note_kept(packet.number, call_log.party)
        if isinstance(received, KeptStream):
            self._remember(received, packet.num_ended)
        refusal = self._why_not(received)
        if refusal is None:
            self._inheritance.answers.append((received, sock))
        else:
            self._refuse(received, sock, refusal)

    def _remember(self, kept: KeptStream, num_ended: int) -> None:
        """Records how many heads such calls have ended; later calls like this one begin with that
        count."""
        tenant, digest, since_s = kept.opening.tenant, kept.opening.digest, time.monotonic()
        if digest and num_ended:
            count = kept.opening.num_ended + num_ended
            self.enders.note(tenant, digest, count, since_s)
            self._packets.send(
                HeadsEnded(tenant=tenant, digest=digest, count=count, since_s=since_s)
            )

    def _why_not(self, received: KeptStream | HalfRead) -> ApiError | None:
        """Returns why the call does not continue, or None if it does."""
        if received.num_ended >= MAX_ENDED:
            return poison_error()
        assert self._inheritance is not None
        timeout_s = self._inheritance.begin.config.api.request_timeout_s
        if isinstance(received, KeptStream) and not received.has_delivered:
            is_late = time.monotonic() - received.opening.arrived_s > timeout_s
            return late_error() if is_late else None
        return None

    def _refuse(
        self, received: KeptStream | HalfRead, sock: socket.socket, error: ApiError
    ) -> None:
        """Ends a call without processing it, and sends the error if its client has received nothing
        yet."""
        name = f"a request that was arriving from {_peer(sock)}"
        payload, request_id = error.payload(), ""
        if isinstance(received, KeptStream):
            opening = received.opening
            request_id = opening.facts.request_id
            name = f"request {request_id}{opening.tenant and f' of tenant {opening.tenant}'}"
            if opening.request.startswith(b"POST /v1/messages"):
                payload = error_payload(error, request_id)
        if error.status == 500:
            log.error("%s has ended %d heads: it is refused", name, received.num_ended)
        received.drop()
        try:
            has_begun = accepted_bytes(sock.fileno()) != received.base
        except OSError:
            has_begun = True
        if has_begun:
            sock.close()
        else:
            send_error(sock, error, payload, request_id)

    def _take_cut(self, packet: AdoptDetachedStream, log_fd: int) -> None:
        assert self._inheritance is not None
        call_log = CallLog(self, packet.number, log_fd)
        try:
            call_log.read()
            if HalfRead.is_in(call_log):  # the log of a half-read request, whose client has left
                call_log.drop()
                return
            kept = KeptStream.take_cut(call_log)
            self._note_kept(packet.number, call_log.party)
        except (ValueError, OSError) as error:
            log.warning("an answer must be computed again if its client comes back: %s", error)
            call_log.drop()
            return
        self._remember(kept, packet.num_ended)
        if kept.opening.digest and kept.may_come_again:
            self._inheritance.cut_answers.append(kept)
        else:
            kept.drop()

    def _forget_kept_twice(self, inheritance: Inheritance) -> None:
        """A head may end after it has kept a call, and before it drops the half-read log of the
        call."""
        kept = {_inode(sock) for log, sock in inheritance.answers if isinstance(log, KeptStream)}
        for each in list(inheritance.answers):
            received, sock = each
            if isinstance(received, HalfRead) and _inode(sock) in kept:
                inheritance.answers.remove(each)
                received.drop()
                sock.close()

    def _on_end(self) -> None:
        os._exit(1)  # the supervisor has ended, and without it no answer could continue


def _peer(sock: socket.socket) -> str:
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return "a client that has left"


def _inode(sock: socket.socket) -> int:
    return os.fstat(sock.fileno()).st_ino
