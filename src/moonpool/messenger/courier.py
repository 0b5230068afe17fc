"""This instance's courier: the process that moves bytes between arenas with NIXL (RDMA, or whatever
else UCX finds), as its threads see it.

    up --it ended, or was ended because a transfer would not--> down --asked for again--> up

Two couriers pull from each other only after their instances have authenticated each other and
exchanged their cards over that connection. `end` is what makes it safe to give a transfer up: when
it returns, nothing writes to the arena any more.
"""

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import secrets
import select
import socket
import subprocess
import sys
import threading
import time

import msgspec

from moonpool.messenger import courier_child
from moonpool.messenger.arena import Arena
from moonpool.messenger.courier_child import (
    ANSWERS,
    BEGIN,
    END,
    LANE,
    MAPPED,
    MAX_MESSAGE_BYTES,
    Card,
    Done,
    Lend,
    Meet,
    Pull,
    Start,
)
from moonpool.messenger.transport import DeadlineError, PeerGoneError

START_S = 20.0
PAUSE_S = 5.0
"""From one start to the next, at least: blocks go over TCP meanwhile."""
GRACE_S = 0.2
_MEET_S = 5.0
_CLOSE_S = 3.0
_log = logging.getLogger(__name__)


class CourierError(Exception):
    """There is no courier; one line says why."""


class _FailedError(PeerGoneError):
    """The courier's own answer: the transfer has ended, in vain."""


class Lane:
    """One connection's way to the courier. Used by one thread."""

    def __init__(self, courier: Courier, number: int, sock: socket.socket) -> None:
        self._courier, self._number = courier, number
        self._sock = sock
        self._lends = False

    @property
    def broken(self) -> bool:
        """The courier that it led to has ended."""
        return self._courier.number != self._number

    def meet(self, card: Card, deadline_s: float) -> None:
        """Raises TransportError."""
        self._ask(Meet(card=card))
        self._await(min(deadline_s, time.monotonic() + _MEET_S), -1)

    def lend(self, lends: bool) -> None:
        """Whether the peer may pull. Raises PeerGoneError."""
        if lends or self._lends:
            self._lends = lends
            self._ask(Lend(lends=lends))

    def pull(self, spans: list[tuple[int, int, int]], deadline_s: float, peer: int) -> None:
        """When it returns or raises TransportError, nothing writes to the spans any more. `peer` is
        the descriptor of the connection that tells of the peer's end."""
        try:
            self._ask(Pull(spans=spans))
            self._await(deadline_s, peer)
        except BaseException as failure:
            if not isinstance(failure, _FailedError):
                self._give_up(failure)
            raise

    def close(self) -> None:
        self._sock.close()

    def _ask(self, ask: Meet | Pull | Lend) -> None:
        try:
            self._sock.send(msgspec.msgpack.encode(ask))
        except OSError as error:
            raise PeerGoneError("the NIXL process has ended") from error

    def _await(self, deadline_s: float, peer: int) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        if peer >= 0:
            poll.register(peer, select.POLLRDHUP)
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise DeadlineError("NIXL brought nothing until the deadline")
            ready = [fd for fd, _ in poll.poll(left_s * 1000)]
            if self._sock.fileno() in ready:
                return self._take_answer()
            if ready:
                raise PeerGoneError("the peer closed the connection")

    def _take_answer(self) -> None:
        try:
            body = self._sock.recv(MAX_MESSAGE_BYTES)
        except OSError:
            body = b""
        if not body:
            raise PeerGoneError("the NIXL process has ended")
        answer = ANSWERS.decode(body)
        if not isinstance(answer, Done) or answer.error:
            raise _FailedError(answer.error if isinstance(answer, Done) else "a card came twice")

    def _give_up(self, failure: BaseException) -> None:
        """The transfer may be about to end; if not, the courier must."""
        try:
            self._await(time.monotonic() + GRACE_S, -1)
        except _FailedError:
            return
        except (DeadlineError, PeerGoneError):
            self._courier.end(self._number, f"{failure}")


class Courier:
    """Thread-safe. `arena` is sealed by it: its processes must have mapped it before that."""

    def __init__(self, arena: Arena, listen_host: str) -> None:
        """Raises CourierError; the arena is sealed then, too."""
        self.port = 0  # where peers with couriers of their own connect; the messenger sets it
        self.number = 0  # of the courier that is up, or was last
        self._arena_bytes = arena.num_bytes
        self._lock = threading.Lock()  # guards what follows
        self._desk: socket.socket | None = None
        self._card: Card | None = None
        self._begun_s = -PAUSE_S
        self._closed = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        try:
            with theirs:  # closed before the wait: else its end would not be noticed
                self._keeper = _spawn(theirs, arena, devices_of(listen_host))
        except OSError as error:
            ours.close()
            arena.seal()
            raise CourierError(f"no process can be started for NIXL: {error}") from None
        try:
            self._expect(MAPPED)
            arena.seal()
            with self._lock:
                self._begin(START_S)
        except (OSError, CourierError) as error:
            arena.seal()
            self.close()
            raise CourierError(f"{error}") from None

    @property
    def pid(self) -> int:
        """Of the keeper."""
        return self._keeper.pid

    def card(self, deadline_s: float) -> Card:
        """Of the courier that is up; starts one if none is. Raises TransportError."""
        if not self._lock.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise DeadlineError("NIXL did not start by the deadline")
        try:
            if self._desk is not None and _hung_up(self._desk):
                self._end("it ended")
            if self._card is None:
                self._begin(max(0.1, deadline_s - time.monotonic()))
            assert self._card is not None
            return self._card
        except CourierError as error:
            raise PeerGoneError(f"{error}") from None
        finally:
            self._lock.release()

    def lane(self, card: Card, deadline_s: float) -> Lane:
        """To the peer whose card this is. Raises TransportError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._lock:
            if self._desk is None:
                ours.close()
                raise PeerGoneError("the NIXL process has ended")
            lane = Lane(self, self.number, ours)
            try:
                socket.send_fds(self._desk, [LANE], [theirs.fileno()])
            except OSError as error:
                lane.close()
                raise PeerGoneError("the NIXL process has ended") from error
        try:
            lane.meet(card, deadline_s)
        except BaseException:
            lane.close()
            raise
        return lane

    def end(self, number: int, why: str) -> None:
        """Ends the courier of this number, if it has not ended yet: every transfer it carries out
        has ended when this returns."""
        with self._lock:
            if number == self.number:
                self._end(why)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._forget()
            self._control.close()
        try:
            self._keeper.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()

    def _begin(self, within_s: float) -> None:
        if self._closed:
            raise CourierError("it was closed")
        if time.monotonic() < self._begun_s + PAUSE_S:
            raise CourierError("NIXL has just been started, and has ended")
        self._begun_s = time.monotonic()
        self.number += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                socket.send_fds(self._control, [BEGIN], [theirs.fileno()])
            ours.settimeout(within_s)
            body = ours.recv(MAX_MESSAGE_BYTES)
            said = (
                ANSWERS.decode(body) if body else Done(error="its process ended while it started")
            )
        except TimeoutError:
            said = Done(error=f"it did not start within {within_s:.0f} s")
        except OSError as error:
            said = Done(error=f"{error}")
        if isinstance(said, Done):
            ours.close()
            raise CourierError(f"NIXL does not start: {said.error}")
        self._desk, self._card = ours, said

    def _end(self, why: str) -> None:
        desk, self._desk, self._card = self._desk, None, None
        if desk is None:
            return
        self.number += 1
        _log.warning("ended the NIXL process; blocks go over TCP until the next is up: %s", why)
        try:
            self._control.send(END)
            self._expect(courier_child.ENDED)
        except (OSError, CourierError):
            # Without its keeper the kernel ends it, and closes its sockets when it has.
            self._keeper.kill()
            self._keeper.wait()
            desk.settimeout(None)
            while desk.recv(MAX_MESSAGE_BYTES):
                pass
        desk.close()

    def _forget(self) -> None:
        if self._desk is not None:
            self._desk.close()
        self._desk, self._card = None, None
        self.number += 1

    def _expect(self, word: bytes) -> None:
        self._control.settimeout(START_S)
        if self._control.recv(64) != word:
            raise CourierError("its keeper has ended")


def has_nixl() -> bool:
    """Its package is installed here."""
    return any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu12"))


def devices_of(host: str) -> str:
    """What UCX may use, by its own names, where this is the address: the loopback device alone, or
    "", whatever UCX finds."""
    try:
        return "lo" if ipaddress.ip_address(socket.gethostbyname(host)).is_loopback else ""
    except (OSError, ValueError):
        return ""


def _spawn(control: socket.socket, arena: Arena, devices: str) -> subprocess.Popen[bytes]:
    start = Start(
        name=f"moonpool-{secrets.token_hex(8)}",
        devices=devices,
        control=control.fileno(),
        arena=arena.fd,
        arena_bytes=arena.num_bytes,
    )
    command = [sys.executable, "-m", courier_child.__name__]
    return subprocess.Popen(  # noqa: S603 - ourselves, and fixed arguments
        [*command, msgspec.json.encode(start).decode()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(control.fileno(), arena.fd),
    )


def _hung_up(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
