"""The processes in which NIXL runs for an instance: a supervisor, and an agent that it forks.

The agent and its supervisor are separate from the instance for two reasons. NIXL's C++ code may end
its process (UCX does so if a peer ends at the wrong moment). Also, a transfer that was given up may
still write. UCX cannot cancel it, so only the end of the process ends it reliably.

    supervisor: maps the arena -> `MAPPED` -> (`START`, which passes the agent's socket, or `STOP`,
                answered by `STOPPED` once no agent runs) ... -> ends with the instance

The supervisor exists because a sealed arena cannot be mapped for writing again: it maps the arena
before the seal, and each agent inherits the mapping. The supervisor has one thread and loads no
libraries, so it may fork. The agent has one thread as well. The agent reads one socket that passes
channels, and the channels, each of which serves one connection to a peer. The agent sleeps while it
neither reads nor is exposed to reads.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import select
import signal
import socket
import sys
import time
from typing import Annotated, Any

import msgspec

from moonpool.children.parent import end_with
from moonpool.installation import install_command
from moonpool.types import Struct

MAPPED, START, STOP, STOPPED, CHANNEL = b"mapped", b"start", b"stop", b"stopped", b"channel"
MAX_MESSAGE_BYTES = 128 << 10
MAX_METADATA_BYTES = 64 << 10
_TICK_S = 50e-6
_SLOW_TICK_S = 1e-3
_QUICK_S = 1.0  # how long the tick stays short after the arena was exposed to reads
_SPINS = 2000

Span = tuple[int, int, int]
"""Bytes to read: (offset in the peer's arena, offset in the own arena, size)."""


class NixlSetup(Struct, frozen=True):
    """The supervisor's only argument. `devices`: the network devices that UCX may use, by UCX's
    names; "" for all. `control`, `arena`: inherited descriptors."""

    name: str
    devices: str
    control: int
    arena: int
    arena_bytes: int


class AgentMetadata(Struct, frozen=True, tag=True):
    """What a peer needs in order to connect to an agent: NIXL's metadata, and the address of the
    agent's arena."""

    metadata: Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA_BYTES)]
    base: Annotated[int, msgspec.Meta(ge=0)]
    num_bytes: Annotated[int, msgspec.Meta(ge=0)]


class ConnectPeer(Struct, frozen=True, tag=True):
    """A channel's first request: adds the peer's agent."""

    metadata: AgentMetadata


class ReadSpans(Struct, frozen=True, tag=True):
    """Reads spans of the peer's arena into the own arena."""

    spans: list[Span]


class ExposeArena(Struct, frozen=True, tag=True):
    """Sets whether the peer may read from our arena. Some networks need this side's work for it."""

    exposed: bool


class AgentReply(Struct, frozen=True, tag=True):
    """Answers ConnectPeer and ReadSpans, and replaces the metadata if the agent does not start."""

    error: str = ""


REQUESTS: msgspec.msgpack.Decoder[ConnectPeer | ReadSpans | ExposeArena] = msgspec.msgpack.Decoder(
    ConnectPeer | ReadSpans | ExposeArena
)
REPLIES: msgspec.msgpack.Decoder[AgentMetadata | AgentReply] = msgspec.msgpack.Decoder(
    AgentMetadata | AgentReply
)


def main() -> None:
    """Runs the supervisor."""
    setup = msgspec.json.decode(sys.argv[1], type=NixlSetup)
    control = socket.socket(fileno=setup.control)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the end of the instance ends this process
    arena = mmap.mmap(setup.arena, setup.arena_bytes)
    os.close(setup.arena)
    control.send(MAPPED)
    pid, num_started = 0, 0
    while True:
        order, fds, _, _ = socket.recv_fds(control, 64, 1)
        if pid:  # waits, because two agents must never run at once
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pid = 0
        if not order:
            os._exit(0)
        if order == STOP:
            control.send(STOPPED)
        elif order == START and fds:
            num_started += 1
            supervisor = os.getpid()
            pid = os.fork()
            if not pid:
                control.close()
                name, instance = f"{setup.name}-{num_started}", socket.socket(fileno=fds[0])
                _run_agent(name, setup.devices, supervisor, instance, arena)
            os.close(fds[0])


def _run_agent(
    name: str, devices: str, supervisor: int, instance: socket.socket, arena: mmap.mmap
) -> None:
    """Runs the agent. Does not return."""
    end_with(supervisor)
    try:
        base = ctypes.addressof(ctypes.c_char.from_buffer(arena))
        agent = _open_agent(name, devices, base, len(arena))
        metadata = agent.get_agent_metadata()
        reply = AgentMetadata(metadata=metadata, base=base, num_bytes=len(arena))
        instance.send(msgspec.msgpack.encode(reply))
        _AgentProcess(agent, base, len(arena), instance).run()
    except Exception as error:  # the instance reports any error of the agent
        instance.send(msgspec.msgpack.encode(AgentReply(error=f"{error}"[:1000])))
    os._exit(1)


def _open_agent(name: str, devices: str, base: int, num_bytes: int) -> Any:
    settings = {"UCX_LOG_LEVEL": "error", "UCX_HANDLE_ERRORS": "none"}
    if devices:
        settings["UCX_NET_DEVICES"] = devices
    for key, value in settings.items():
        os.environ.setdefault(key, value)  # the user's own settings have priority
    try:
        try:
            from nixl import _api as nixl
        except ImportError:  # then only the package of one CUDA version is installed
            from nixl_cu12 import _api as nixl
    except ImportError as error:
        raise RuntimeError(
            f"NIXL cannot be imported ({error}); every machine needs it, and this one gets it by:"
            f" {install_command('nixl')}"
        ) from None
    for logger in ("nixl", "nixl_cu12", "nixl_cu13"):
        logging.getLogger(logger).setLevel(logging.WARNING)
    # Runs without NIXL's progress thread, which would keep a core busy: the calls below make
    # progress.
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("UCX")
    agent.register_memory([(base, num_bytes, 0, "")], "DRAM")
    return agent


class _AgentChannel:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.peer: AgentMetadata | None = None
        self.remote = ""
        self.exposed = False
        self.transfer: Any = None  # NIXL's handle of the transfer in progress


class _AgentProcess:
    """The event loop of the agent process. `instance`: the socket that passes new channels."""

    def __init__(self, agent: Any, base: int, num_bytes: int, instance: socket.socket) -> None:
        self._agent = agent
        self._base, self._num_bytes = base, num_bytes
        self._instance = instance
        self._channels: dict[int, _AgentChannel] = {}
        self._users: dict[str, int] = {}  # number of channels per remote agent
        self._poll = select.poll()
        self._poll.register(instance, select.POLLIN)
        self._exposed_s = 0.0

    def run(self) -> None:
        """Serves requests until the instance hangs up."""
        spins = 0
        while True:
            reading = [c for c in self._channels.values() if c.transfer is not None]
            exposed = any(channel.exposed for channel in self._channels.values())
            ready = self._poll.poll(0 if reading or exposed else None)
            for fd, _ in ready:
                if fd == self._instance.fileno():
                    self._accept_channel()
                else:
                    self._serve_request(self._channels[fd])
            for channel in reading:
                self._check_transfer(channel)
            if exposed:
                self._agent.get_new_notifs()  # makes progress on peers' reads of the own arena
            if ready or any(channel.transfer is None for channel in reading):
                spins = 0
            elif reading and spins < _SPINS:
                spins += 1
            else:
                quick = reading or time.monotonic() - self._exposed_s < _QUICK_S
                time.sleep(_TICK_S if quick else _SLOW_TICK_S)

    def _accept_channel(self) -> None:
        message, fds, _, _ = socket.recv_fds(self._instance, 64, 1)
        if not message or not fds:
            os._exit(0)
        self._channels[fds[0]] = _AgentChannel(socket.socket(fileno=fds[0]))
        self._poll.register(fds[0], select.POLLIN)

    def _serve_request(self, channel: _AgentChannel) -> None:
        try:
            body = channel.sock.recv(MAX_MESSAGE_BYTES)
        except OSError:
            body = b""
        if not body:
            self._drop(channel)
            return
        try:
            request = REQUESTS.decode(body)
            if isinstance(request, ExposeArena):
                channel.exposed = request.exposed
                self._exposed_s = time.monotonic()
            elif isinstance(request, ConnectPeer):
                self._connect(channel, request.metadata)
                self._reply(channel)
            else:
                self._read(channel, request.spans)
        except Exception as error:  # an error of NIXL, or an invalid request
            self._reply(channel, f"NIXL: {error}")

    def _connect(self, channel: _AgentChannel, peer: AgentMetadata) -> None:
        remote = self._agent.add_remote_agent(peer.metadata)
        channel.remote = remote.decode() if isinstance(remote, bytes) else remote
        channel.peer = peer
        self._users[channel.remote] = self._users.get(channel.remote, 0) + 1

    def _read(self, channel: _AgentChannel, spans: list[Span]) -> None:
        peer = channel.peer
        if peer is None or channel.transfer is not None:
            raise ValueError("a read was requested before the connection, or during another read")
        for source, target, size in spans:
            if not (0 <= source <= source + size <= peer.num_bytes):
                raise ValueError("the peer offered what is not in its arena")
            if not (0 <= target <= target + size <= self._num_bytes):
                raise ValueError("a span is outside the arena")
        agent = self._agent
        here = agent.get_xfer_descs([(self._base + t, n, 0) for _, t, n in spans], "DRAM")
        there = agent.get_xfer_descs([(peer.base + s, n, 0) for s, _, n in spans], "DRAM")
        channel.transfer = agent.initialize_xfer("READ", here, there, channel.remote)
        self._note_state(channel, agent.transfer(channel.transfer))

    def _check_transfer(self, channel: _AgentChannel) -> None:
        try:
            state = self._agent.check_xfer_state(channel.transfer)
        except Exception as error:  # raised if the peer has ended
            self._note_state(channel, "ERR", f"{error}")
        else:
            self._note_state(channel, state)

    def _note_state(self, channel: _AgentChannel, state: str, error: str = "it failed") -> None:
        if state == "PROC":
            return
        transfer, channel.transfer = channel.transfer, None
        self._agent.release_xfer_handle(transfer)
        self._reply(channel, "" if state == "DONE" else f"NIXL: {error}")

    def _reply(self, channel: _AgentChannel, error: str = "") -> None:
        try:
            channel.sock.send(msgspec.msgpack.encode(AgentReply(error=error[:1000])))
        except OSError:
            self._drop(channel)

    def _drop(self, channel: _AgentChannel) -> None:
        """Removes a channel whose connection has ended. An instance that hangs up while a transfer
        runs stops this process instead."""
        fd = channel.sock.fileno()
        if fd < 0:
            return
        self._poll.unregister(fd)
        del self._channels[fd]
        channel.sock.close()
        if channel.remote:
            self._users[channel.remote] -= 1
            if not self._users[channel.remote]:
                del self._users[channel.remote]
                self._agent.remove_remote_agent(channel.remote)


if __name__ == "__main__":
    main()
