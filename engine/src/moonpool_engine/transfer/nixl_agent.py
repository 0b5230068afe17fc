"""This instance's NIXL agent, as threads of the instance use it. The agent runs in a separate
process (`nixl_agent_process`) and copies bytes between arenas by RDMA or another way that UCX
finds.

    running --it ended, or was stopped because of a stuck transfer--> down --next use--> running

Two agents read from each other only after their instances have authenticated each other and
exchanged the agents' metadata over that connection. `NixlAgent.stop` makes it safe to give up a
transfer: after it returns, nothing writes to the arena any more.
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

from moonpool_engine.transfer import nixl_agent_process
from moonpool_engine.transfer.arena import Arena
from moonpool_engine.transfer.errors import DeadlineError, PeerGoneError
from moonpool_engine.transfer.nixl_agent_process import (
    CHANNEL,
    MAPPED,
    MAX_MESSAGE_BYTES,
    REPLIES,
    START,
    STOP,
    STOPPED,
    AgentMetadata,
    AgentReply,
    ConnectPeer,
    ExposeArena,
    NixlSetup,
    ReadSpans,
    Span,
)

START_S = 20.0
PAUSE_S = 5.0
"""Least time between two starts of the agent; blocks use TCP in the meantime."""
GRACE_S = 0.2
_CONNECT_S = 5.0
_CLOSE_S = 3.0
_log = logging.getLogger(__name__)


class NixlAgentError(Exception):
    """The agent cannot be started; the text is one line."""


class _ReadFailedError(PeerGoneError):
    """The agent reported that the transfer has failed: it does not run any more."""


class NixlChannel:
    """One connection's channel to the agent process. One thread uses a `NixlChannel`."""

    def __init__(self, agent: NixlAgent, generation: int, sock: socket.socket) -> None:
        self._agent, self._generation = agent, generation
        self._sock = sock
        self._exposed = False

    @property
    def broken(self) -> bool:
        """Whether the agent process that this channel leads to has ended."""
        return self._agent.generation != self._generation

    def connect(self, metadata: AgentMetadata, deadline_s: float) -> None:
        """Connects to the peer's agent. Raises TransportError."""
        self._request(ConnectPeer(metadata=metadata))
        self._await_reply(min(deadline_s, time.monotonic() + _CONNECT_S), -1)

    def expose(self, exposed: bool) -> None:
        """Sets whether the peer may read from our arena. Raises PeerGoneError."""
        if exposed or self._exposed:
            self._exposed = exposed
            self._request(ExposeArena(exposed=exposed))

    def read(self, spans: list[Span], deadline_s: float, peer_fd: int) -> None:
        """Reads spans of the peer's arena. When it returns or raises TransportError, nothing writes
        to the spans any more. `peer_fd`: the connection whose state shows whether the peer has
        ended."""
        try:
            self._request(ReadSpans(spans=spans))
            self._await_reply(deadline_s, peer_fd)
        except BaseException as failure:
            if not isinstance(failure, _ReadFailedError):
                self._stop_transfer(failure)
            raise

    def close(self) -> None:
        self._sock.close()

    def _request(self, request: ConnectPeer | ReadSpans | ExposeArena) -> None:
        try:
            self._sock.send(msgspec.msgpack.encode(request))
        except OSError as error:
            raise PeerGoneError("the NIXL process has ended") from error

    def _await_reply(self, deadline_s: float, peer_fd: int) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        if peer_fd >= 0:
            poll.register(peer_fd, select.POLLRDHUP)
        while True:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise DeadlineError("NIXL did not finish before the deadline")
            ready = [fd for fd, _ in poll.poll(left_s * 1000)]
            if self._sock.fileno() in ready:
                return self._receive_reply()
            if ready:
                raise PeerGoneError("the peer closed the connection")

    def _receive_reply(self) -> None:
        try:
            body = self._sock.recv(MAX_MESSAGE_BYTES)
        except OSError:
            body = b""
        if not body:
            raise PeerGoneError("the NIXL process has ended")
        reply = REPLIES.decode(body)
        if not isinstance(reply, AgentReply) or reply.error:
            text = reply.error if isinstance(reply, AgentReply) else "its metadata came twice"
            raise _ReadFailedError(text)

    def _stop_transfer(self, failure: BaseException) -> None:
        """Waits a moment for the transfer to end, then stops the agent."""
        try:
            self._await_reply(time.monotonic() + GRACE_S, -1)
        except _ReadFailedError:
            return
        except (DeadlineError, PeerGoneError):
            self._agent.stop(self._generation, f"{failure}")


class NixlAgent:
    """Starts the agent process, and starts it again after it has ended. Thread-safe.

    The agent seals the arena, so other processes must have mapped it before."""

    def __init__(self, arena: Arena, listen_host: str) -> None:
        """Raises NixlAgentError; the arena is sealed then, too."""
        self.port = 0  # port to which peers with NIXL connect; the messenger sets it
        self.generation = 0  # number of starts and ends of the agent process
        self._lock = threading.Lock()  # guards the fields below
        self._agent_socket: socket.socket | None = None
        self._metadata: AgentMetadata | None = None
        self._started_s = -PAUSE_S
        self._closed = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control = ours
        try:
            # closed before the wait, because otherwise the process's end would go unnoticed
            with theirs:
                self._supervisor = _spawn(theirs, arena, ucx_devices(listen_host))
        except OSError as error:
            ours.close()
            arena.seal()
            raise NixlAgentError(f"the NIXL process cannot be started: {error}") from None
        try:
            self._expect(MAPPED)
            arena.seal()
            with self._lock:
                self._start(START_S)
        except (OSError, NixlAgentError) as error:
            arena.seal()
            self.close()
            raise NixlAgentError(f"{error}") from None

    @property
    def pid(self) -> int:
        """The process id of the supervisor."""
        return self._supervisor.pid

    def metadata(self, deadline_s: float) -> AgentMetadata:
        """Returns the agent's metadata for peers. Starts the agent if it is down. Raises
        TransportError."""
        if not self._lock.acquire(timeout=max(0.0, deadline_s - time.monotonic())):
            raise DeadlineError("NIXL did not start by the deadline")
        try:
            if self._agent_socket is not None and _hung_up(self._agent_socket):
                self._stop("it ended")
            if self._metadata is None:
                self._start(max(0.1, deadline_s - time.monotonic()))
            assert self._metadata is not None
            return self._metadata
        except NixlAgentError as error:
            raise PeerGoneError(f"{error}") from None
        finally:
            self._lock.release()

    def open_channel(self, metadata: AgentMetadata, deadline_s: float) -> NixlChannel:
        """Returns a channel connected to the peer with this metadata. Raises TransportError."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, self._lock:
            if self._agent_socket is None:
                ours.close()
                raise PeerGoneError("the NIXL process has ended")
            channel = NixlChannel(self, self.generation, ours)
            try:
                socket.send_fds(self._agent_socket, [CHANNEL], [theirs.fileno()])
            except OSError as error:
                channel.close()
                raise PeerGoneError("the NIXL process has ended") from error
        try:
            channel.connect(metadata, deadline_s)
        except BaseException:
            channel.close()
            raise
        return channel

    def stop(self, generation: int, reason: str) -> None:
        """Stops the agent process of this generation if it still runs. When this returns, every
        transfer of that process has ended."""
        with self._lock:
            if generation == self.generation:
                self._stop(reason)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            if self._agent_socket is not None:
                self._agent_socket.close()
            self._agent_socket, self._metadata = None, None
            self.generation += 1
            self._control.close()
        try:
            self._supervisor.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            self._supervisor.kill()
            self._supervisor.wait()

    def _start(self, within_s: float) -> None:
        if self._closed:
            raise NixlAgentError("it was closed")
        if time.monotonic() < self._started_s + PAUSE_S:
            raise NixlAgentError("NIXL ended soon after its start; the next start is after a pause")
        self._started_s = time.monotonic()
        self.generation += 1
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                socket.send_fds(self._control, [START], [theirs.fileno()])
            ours.settimeout(within_s)
            body = ours.recv(MAX_MESSAGE_BYTES)
            reply = (
                REPLIES.decode(body)
                if body
                else AgentReply(error="its process ended while it started")
            )
        except TimeoutError:
            reply = AgentReply(error=f"it did not start within {within_s:.0f} s")
        except OSError as error:
            reply = AgentReply(error=f"{error}")
        if isinstance(reply, AgentReply):
            ours.close()
            raise NixlAgentError(f"NIXL does not start: {reply.error}")
        self._agent_socket, self._metadata = ours, reply

    def _stop(self, reason: str) -> None:
        agent_socket, self._agent_socket, self._metadata = self._agent_socket, None, None
        if agent_socket is None:
            return
        self.generation += 1
        _log.warning("stopped the NIXL process; blocks go over TCP until it runs again: %s", reason)
        try:
            self._control.send(STOP)
            self._expect(STOPPED)
        except (OSError, NixlAgentError):
            # If its supervisor ends, the kernel kills the agent and closes its sockets.
            self._supervisor.kill()
            self._supervisor.wait()
            agent_socket.settimeout(None)
            while agent_socket.recv(MAX_MESSAGE_BYTES):
                pass
        agent_socket.close()

    def _expect(self, message: bytes) -> None:
        self._control.settimeout(START_S)
        if self._control.recv(64) != message:
            raise NixlAgentError("the supervisor of the NIXL process has ended")


def has_nixl() -> bool:
    """Whether the NIXL package is installed here."""
    return any(importlib.util.find_spec(name) for name in ("nixl", "nixl_cu12"))


def ucx_devices(host: str) -> str:
    """Returns the network devices, by UCX's names, that UCX may use with this listen address: the
    loopback device alone, or "" for all."""
    try:
        return "lo" if ipaddress.ip_address(socket.gethostbyname(host)).is_loopback else ""
    except (OSError, ValueError):
        return ""


def _spawn(control: socket.socket, arena: Arena, devices: str) -> subprocess.Popen[bytes]:
    setup = NixlSetup(
        name=f"moonpool-{secrets.token_hex(8)}",
        devices=devices,
        control=control.fileno(),
        arena=arena.fd,
        arena_bytes=arena.num_bytes,
    )
    command = [sys.executable, "-m", nixl_agent_process.__name__]
    return subprocess.Popen(  # noqa: S603 - ourselves, and fixed arguments
        [*command, msgspec.json.encode(setup).decode()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(control.fileno(), arena.fd),
    )


def _hung_up(sock: socket.socket) -> bool:
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    return bool(poll.poll(0))
