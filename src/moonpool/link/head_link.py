"""A worker's end of its control connection, and what every instance's process does over it.

`HeadLink` connects to the head, and reconnects when the connection is lost. The link owns the
reason why the worker ends: a stop from the head, a failure, or a head that stays away.
`InstanceProcess` joins and leaves the cluster over a link.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import msgspec

from moonpool import __version__
from moonpool.link.auth import ClientHandshake, Identity
from moonpool.link.channel import Channel
from moonpool.link.tls import (
    CERTIFICATE_REFUSED,
    HANDSHAKE_S,
    SERVER_MAY_NEED_TLS,
    PeerTls,
    is_refusal,
    tls_text,
)
from moonpool.link.token_routes import TokenRoutes
from moonpool.protocol.frames import (
    CONTROL_SERVICE,
    AnswersCopied,
    DownFrame,
    Failed,
    Joined,
    Leadership,
    Stop,
    TurnedAway,
    UpFrame,
    WorkFrame,
)
from moonpool.protocol.known_heads import KnownHeads
from moonpool.protocol.messages import LeaveRequested
from moonpool.protocol.versions import STATES_RELEASE
from moonpool.types import InstanceId, Role

log = logging.getLogger("moonpool.worker")

RECONNECT_S = 60.0
"""How long a worker tries to reach a lost head before it ends."""
RETRY_S = 1.0
MAX_CUTS = 4
"""Encrypted connections in a row that end before the head proves the secret: the worker ends."""
CONNECT_S = 3.0
"""How long a machine that does not respond may delay the attempt to reach another head."""
SILENT_HEAD_S = 15
"""Seconds without a message after which a head counts as lost, where there is a standby."""
AGAIN_S = 0.02
"""Time until the first try after a connection was lost."""

HeadChannel = Channel[DownFrame, UpFrame]


class WorkerError(Exception):
    """The worker cannot continue; one line for the person who started it."""


class HeadGoneError(WorkerError):
    """No head could be reached for too long."""


class ToldError(WorkerError):
    """A `WorkerError` that the head already knows, and reports."""


class HungError(WorkerError):
    """A `WorkerError` of a process with a hanging thread, which its exit must not wait for."""


class Follower(Protocol):
    """The worker behind a link, as the link sees it. Called on the event loop."""

    def on_head(self) -> None:
        """The connection is open: the worker may apply."""
        ...

    def on_frame(self, frame: WorkFrame) -> None: ...

    def on_lost(self) -> None:
        """The connection has ended, or could not be opened. The link tries to connect again after
        that."""
        ...


class HeadLink:
    """`run` lasts as long as the worker; `channel` is None without a connection."""

    def __init__(
        self,
        name: InstanceId,
        secret: bytes,
        follower: Follower,
        tls: PeerTls | None = None,
        heads: KnownHeads | None = None,
        patience_s: float | None = None,
    ) -> None:
        """`heads`: the addresses that an earlier link knew. `patience_s`: how long to try without a
        head; RECONNECT_S unless given."""
        self.heads = heads or KnownHeads()
        self.leadership: Leadership | None = None
        """What the head has last said about itself."""
        self.on_answers: Callable[[AnswersCopied], None] | None = None
        """Called with copies of answers under way."""
        self._patience_s = RECONNECT_S if patience_s is None else patience_s
        self._silent_s: int | None = None  # None if the head does not promise regular messages
        self._promised = asyncio.Event()
        self.channel: HeadChannel | None = None
        self.stopping = False
        self.fatal = ""
        self._name = name
        self._secret = secret
        self._follower = follower
        self._tls = tls
        self._num_cuts = 0  # number of lost connections in a row
        self._was_told = False  # whether the head knows `fatal`
        self._was_open = False  # whether a connection without TLS was open to this head
        self._refused = False  # whether this head must not be tried again at once
        self._loop = asyncio.get_running_loop()
        self._closed: asyncio.Future[str] = self._loop.create_future()

    @property
    def local_host(self) -> str:
        """Returns this machine's address as the head sees it."""
        assert self.channel is not None
        return self.channel.local_host

    @property
    def protocol(self) -> int:
        """The protocol version agreed on for the present connection; 0 without a connection."""
        return 0 if self.channel is None else self.channel.protocol

    def not_open(self) -> str:
        """Returns "", or a text saying that there is no head."""
        address = self.heads.address
        where = f"{address.host}:{address.port}"
        return "" if self.protocol else f"there is no connection to the head at {where}"

    def send(self, *frames: UpFrame) -> None:
        """Sends frames, or does nothing without a connection."""
        if self.channel is not None:
            self.channel.send(*frames)

    def stop(self, reason: str) -> None:
        """Lets `run` return after everything is sent."""
        self.stopping = True
        self._hang_up(reason)

    def fail(self, message: str, reason: str, was_told: bool = False) -> None:
        """Lets `run` raise WorkerError(`message`); the head logs `reason`. `was_told`: whether the
        head already knows the message."""
        self.fatal, self._was_told = message, was_told
        self._hang_up(reason)

    async def run(self, head_host: str, head_port: int) -> None:
        """Serves until `stop` or the head ends it. Raises WorkerError."""
        heads = self.heads
        heads.begin(head_host, head_port)
        heard_s = time.monotonic()
        while True:
            where = f"{heads.address.host}:{heads.address.port}"
            was_there, reason = await self._serve_once(heads.address.host, heads.address.port)
            if self._is_over():
                return
            self._follower.on_lost()
            if self._is_over():
                return
            now_s = time.monotonic()
            heard_s = now_s if was_there else heard_s
            if now_s - heard_s >= self._patience_s:
                is_new = self._num_cuts and not self._tls and not self._was_open
                hint = f" ({SERVER_MAY_NEED_TLS})" if is_new else ""
                raise HeadGoneError(f"the head at {where} is gone: {reason}{hint}")
            log.warning("no connection to the head at %s: %s; trying again", where, reason)
            # A supervisor keeps the port open, and has another head soon.
            await asyncio.sleep(AGAIN_S if was_there else RETRY_S)
            if not was_there:
                heads.next_address()
            if self._is_over():
                return

    def _is_over(self) -> bool:
        if self.fatal and not self.stopping:
            raise (ToldError if self._was_told else WorkerError)(self.fatal)
        return self.stopping

    async def _serve_once(self, head_host: str, head_port: int) -> tuple[bool, str]:
        """Serves one connection. Returns whether it was opened, and why it ended."""
        me = Identity(instance_id=self._name, service=CONTROL_SERVICE, fingerprint=b"")
        handshake = ClientHandshake(self._secret, me)
        self._closed = self._loop.create_future()
        channel: HeadChannel = Channel(handshake, msgspec.msgpack.Decoder(DownFrame), self)
        self.channel, self._silent_s, self._refused = channel, None, False
        self._promised.clear()
        try:
            await self._connect(channel, head_host, head_port)
            silence = asyncio.create_task(self._watch(channel))
            try:
                reason = await self._closed
            finally:
                silence.cancel()
            self._note_cut(channel)
            return channel.protocol > 0 and not self._refused, reason
        except ssl.SSLError as error:
            if is_refusal(error):
                self.fatal = f"the head and this worker do not agree: {tls_text(error)}"
            return False, tls_text(error)
        except TimeoutError:
            return False, "no response"
        except OSError as error:
            return False, str(error)
        finally:
            channel.close()
            self.channel = None

    async def _connect(self, channel: HeadChannel, head_host: str, head_port: int) -> None:
        tls = self._tls
        async with asyncio.timeout(CONNECT_S if tls is None else CONNECT_S + HANDSHAKE_S):
            await self._loop.create_connection(
                lambda: channel,
                head_host,
                head_port,
                ssl=None if tls is None else tls.client,
                server_hostname=None if tls is None else "",
                ssl_handshake_timeout=None if tls is None else HANDSHAKE_S,
            )

    async def _watch(self, channel: HeadChannel) -> None:
        """Ends a connection if a head that promised to send messages is silent. Silence is counted
        in turns of this loop, not by the clock, because a stopped process cannot listen."""
        while True:
            await self._promised.wait()
            await asyncio.sleep(1.0)
            if self._silent_s is not None:
                self._silent_s += 1
                if self._silent_s > SILENT_HEAD_S:
                    self._refused = True  # another head is tried now
                    channel.abort(f"no message for {SILENT_HEAD_S} s")

    def _note_cut(self, channel: HeadChannel) -> None:
        """Counts connections that ended before the head proved the secret: a server of TLS 1.3 that
        does not accept a certificate ends the connection after the client believes it open, and
        often without a reason. After MAX_CUTS encrypted ones this worker ends."""
        self._num_cuts = 0 if channel.protocol else self._num_cuts + 1
        self._was_open = self._was_open or channel.protocol > 0
        if self._num_cuts >= MAX_CUTS and self._tls is not None:
            self.fatal = f"the head and this worker do not agree: {CERTIFICATE_REFUSED}"

    def _hang_up(self, reason: str) -> None:
        if self.channel is not None:
            self.channel.close(reason)

    # Methods by which it listens to the channel

    def on_connected(self) -> None:
        """Does nothing: the handshake decides."""

    def on_open(self, peer: Identity) -> None:
        self._follower.on_head()

    def _on_leadership(self, frame: Leadership) -> None:
        if frame.replaced:
            self.heads.lead_elsewhere(frame)
            self._hang_up("another head has replaced this one")
        elif not self.heads.accept_leader(frame):
            self._refused = True
            self._hang_up(f"a head of epoch {self.heads.epoch} has replaced it")
        else:
            self.leadership = frame
            self._silent_s = 0 if frame.standbys else None
            if frame.standbys:
                self._promised.set()
            else:
                self._promised.clear()

    def on_frame(self, frame: DownFrame) -> None:
        if self._silent_s is not None:
            self._silent_s = 0
        match frame:
            case Leadership():
                self._on_leadership(frame)
            case Stop():
                self.stop("the head stops")
            case TurnedAway():
                self.fail(
                    f"the head rejected {self._name}: {frame.message}", "rejected", was_told=True
                )
            case AnswersCopied():
                if self.on_answers is not None:
                    self.on_answers(frame)
            case _:
                self._follower.on_frame(frame)

    def on_closed(self, reason: str) -> None:
        if self.channel is not None and self.channel.refused:
            self.fatal = f"the head and this worker do not agree: {reason}"
        if not self._closed.done():
            self._closed.set_result(reason)


class InstanceProcess(ABC):
    """The life cycle that instances with Moonpool's engine and with vLLM share.

    The process joins over its link. To leave in order, it reports the wish to the head, which
    drains the instance and then lets it go.
    """

    def __init__(
        self,
        role: Role,
        instance_id: InstanceId,
        machine: str,
        secret: bytes,
        tls: PeerTls | None = None,
    ) -> None:
        self.role = role
        self.instance_id = instance_id
        self._machine = machine
        self._secret = secret
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._link = HeadLink(instance_id, secret, self, tls)
        self._routes = TokenRoutes(
            instance_id,
            secret,
            tls,
            lambda: self._link.heads.address.host,
            lambda reports: self._link.send(*reports),
        )
        self._joined = False  # whether the worker has joined over the current connection
        self._leave_by_s: float | None = None

    def ask_to_leave(self, within_s: float) -> bool:
        """Asks the head to drain this instance, which ends `run`. Returns False if this instance
        has not joined a head."""
        if not self._joined:
            return False
        self._leave_by_s = time.monotonic() + within_s
        self._report_leaving()
        return True

    def not_ready(self) -> str:
        """Returns "", or why no request comes to this instance."""
        if self._leave_by_s is not None:
            return "the instance is leaving"
        return "" if self._joined else self._link.not_open() or "the instance is starting"

    @abstractmethod
    def on_head(self) -> None: ...

    @abstractmethod
    def on_frame(self, frame: WorkFrame) -> None: ...

    @abstractmethod
    def _abort_all(self) -> None:
        """Ends all attempts: the head that wanted their tokens is gone."""

    def on_lost(self) -> None:
        self._joined = False
        self._routes.reset()
        if self._leave_by_s is not None and time.monotonic() > self._leave_by_s:
            self._link.stop("it leaves")  # no head will drain the instance in time
        else:
            self._abort_all()

    def _join_over(self, channel: HeadChannel | None, joined: Joined) -> None:
        """Joins, unless the connection of the `Setup` has been replaced."""
        if channel is None or channel is not self._link.channel or self._link.stopping:
            return
        if channel.protocol >= STATES_RELEASE:
            joined = msgspec.structs.replace(joined, release=__version__)
        self._link.send(joined)
        self._joined = True
        self._report_leaving()

    def _report_leaving(self) -> None:
        """Reports that the instance leaves, to a head that came back too."""
        if self._leave_by_s is not None:
            within_s = max(self._leave_by_s - time.monotonic(), 0.0)
            self._link.send(LeaveRequested(within_s=within_s))

    def _fail(self, message: str) -> None:
        """Reports a failed start to the head, and ends this process."""
        self._link.send(Failed(message=message))
        self._link.fail(message, "it cannot start", was_told=True)
