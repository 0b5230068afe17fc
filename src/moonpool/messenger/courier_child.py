"""The processes in which NIXL runs, beside an instance: a keeper, and a courier that it forks.

They stand apart because NIXL's C++ may end the process that it runs in (UCX does, where a peer
went away at the wrong moment), and because a transfer that was given up may still write: UCX takes
none back. Only the end of the process that carries it out is sure to end it.

    keeper: maps the arena -> `MAPPED` -> (`BEGIN`, which hands over the courier's socket, or `END`,
            answered by `ENDED` once no courier lives) ... -> ends with the instance

The keeper is there because an arena, once sealed, cannot be mapped anew to write: it is mapped
before that, and every courier inherits the mapping. It has one thread and no libraries, so it may
fork. The courier reads nothing but its sockets: one that brings lanes, and the lanes, each for one
connection to a peer. It has one thread as well; while it neither pulls nor lends, it sleeps.
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

from moonpool.messenger.parent import end_with
from moonpool.types import Struct

MAPPED, BEGIN, END, ENDED, LANE = b"mapped", b"begin", b"end", b"ended", b"lane"
MAX_MESSAGE_BYTES = 128 << 10
MAX_METADATA_BYTES = 64 << 10
_TICK_S = 50e-6
_SLOW_TICK_S = 1e-3
_QUICK_S = 1.0  # so long after something was lent it ticks quickly
_SPINS = 2000


class Start(Struct, frozen=True):
    """The keeper's first and only argument. `devices`: UCX's name of the networks that it may use;
    "" for all."""

    name: str
    devices: str
    control: int
    arena: int
    arena_bytes: int


class Card(Struct, frozen=True, tag=True):
    """How peers reach a courier: what NIXL says of it, and where its arena begins."""

    metadata: Annotated[bytes, msgspec.Meta(max_length=MAX_METADATA_BYTES)]
    base: Annotated[int, msgspec.Meta(ge=0)]
    num_bytes: Annotated[int, msgspec.Meta(ge=0)]


class Meet(Struct, frozen=True, tag=True):
    """A lane's first message: whom it leads to."""

    card: Card


class Pull(Struct, frozen=True, tag=True):
    """Spans of bytes, each (where in the peer's arena, where in ours, how many)."""

    spans: list[tuple[int, int, int]]


class Lend(Struct, frozen=True, tag=True):
    """The peer may pull from now on, or no more. Over some networks it takes both sides' work."""

    lends: bool


class Done(Struct, frozen=True, tag=True):
    """Answers Meet and Pull; and a courier's first word, in the place of its card, if it fails."""

    error: str = ""


ASKS: msgspec.msgpack.Decoder[Meet | Pull | Lend] = msgspec.msgpack.Decoder(Meet | Pull | Lend)
ANSWERS: msgspec.msgpack.Decoder[Card | Done] = msgspec.msgpack.Decoder(Card | Done)


def main() -> None:
    """Of the keeper."""
    start = msgspec.json.decode(sys.argv[1], type=Start)
    control = socket.socket(fileno=start.control)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the instance's own end is what ends it
    arena = mmap.mmap(start.arena, start.arena_bytes)
    os.close(start.arena)
    control.send(MAPPED)
    pid, num_begun = 0, 0
    while True:
        order, fds, _, _ = socket.recv_fds(control, 64, 1)
        if pid:  # a courier never follows another one that still lives
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            pid = 0
        if not order:
            os._exit(0)
        if order == END:
            control.send(ENDED)
        elif order == BEGIN and fds:
            num_begun += 1
            keeper = os.getpid()
            pid = os.fork()
            if not pid:
                control.close()
                name, desk = f"{start.name}-{num_begun}", socket.socket(fileno=fds[0])
                _live(name, start.devices, keeper, desk, arena)
            os.close(fds[0])


def _live(name: str, devices: str, keeper: int, desk: socket.socket, arena: mmap.mmap) -> None:
    """Of the courier; does not return."""
    end_with(keeper)
    try:
        base = ctypes.addressof(ctypes.c_char.from_buffer(arena))
        agent = _open_agent(name, devices, base, len(arena))
        card = Card(metadata=agent.get_agent_metadata(), base=base, num_bytes=len(arena))
        desk.send(msgspec.msgpack.encode(card))
        _Courier(agent, base, len(arena), desk).run()
    except Exception as error:  # whatever it is, the parent shall say it
        desk.send(msgspec.msgpack.encode(Done(error=f"{error}"[:1000])))
    os._exit(1)


def _open_agent(name: str, devices: str, base: int, num_bytes: int) -> Any:
    settings = {"UCX_LOG_LEVEL": "error", "UCX_HANDLE_ERRORS": "none"}
    if devices:
        settings["UCX_NET_DEVICES"] = devices
    for key, value in settings.items():
        os.environ.setdefault(key, value)  # what the user has set stands
    try:
        try:
            from nixl import _api as nixl
        except ImportError:  # the package of one CUDA version alone
            from nixl_cu12 import _api as nixl
    except ImportError as error:
        raise RuntimeError(
            f"NIXL cannot be imported ({error}): pip install 'moonpool[nixl]' on every machine"
        ) from None
    for logger in ("nixl", "nixl_cu12", "nixl_cu13"):
        logging.getLogger(logger).setLevel(logging.WARNING)
    # No thread of NIXL's own: it would keep a core busy. Its calls below make it go on.
    agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend("UCX")
    agent.register_memory([(base, num_bytes, 0, "")], "DRAM")
    return agent


class _Lane:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.card: Card | None = None
        self.remote = ""
        self.lends = False
        self.handle: Any = None


class _Courier:
    def __init__(self, agent: Any, base: int, num_bytes: int, desk: socket.socket) -> None:
        self._agent = agent
        self._base, self._num_bytes = base, num_bytes
        self._desk = desk
        self._lanes: dict[int, _Lane] = {}
        self._users: dict[str, int] = {}
        self._poll = select.poll()
        self._poll.register(desk, select.POLLIN)
        self._lent_s = 0.0

    def run(self) -> None:
        """Until the instance hangs up."""
        spins = 0
        while True:
            pulling = [lane for lane in self._lanes.values() if lane.handle is not None]
            lending = any(lane.lends for lane in self._lanes.values())
            ready = self._poll.poll(0 if pulling or lending else None)
            for fd, _ in ready:
                if fd == self._desk.fileno():
                    self._welcome()
                else:
                    self._listen(self._lanes[fd])
            for lane in pulling:
                self._look_after(lane)
            if lending:
                self._agent.get_new_notifs()  # answers those who pull from us
            if ready or any(lane.handle is None for lane in pulling):
                spins = 0
            elif pulling and spins < _SPINS:
                spins += 1
            else:
                quick = pulling or time.monotonic() - self._lent_s < _QUICK_S
                time.sleep(_TICK_S if quick else _SLOW_TICK_S)

    def _welcome(self) -> None:
        message, fds, _, _ = socket.recv_fds(self._desk, 64, 1)
        if not message or not fds:
            os._exit(0)
        self._lanes[fds[0]] = _Lane(socket.socket(fileno=fds[0]))
        self._poll.register(fds[0], select.POLLIN)

    def _listen(self, lane: _Lane) -> None:
        try:
            body = lane.sock.recv(MAX_MESSAGE_BYTES)
        except OSError:
            body = b""
        if not body:
            self._drop(lane)
            return
        try:
            ask = ASKS.decode(body)
            if isinstance(ask, Lend):
                lane.lends = ask.lends
                self._lent_s = time.monotonic()
            elif isinstance(ask, Meet):
                self._meet(lane, ask.card)
                self._answer(lane)
            else:
                self._pull(lane, ask.spans)
        except Exception as error:  # of NIXL's, or of what was asked
            self._answer(lane, f"NIXL: {error}")

    def _meet(self, lane: _Lane, card: Card) -> None:
        remote = self._agent.add_remote_agent(card.metadata)
        lane.remote = remote.decode() if isinstance(remote, bytes) else remote
        lane.card = card
        self._users[lane.remote] = self._users.get(lane.remote, 0) + 1

    def _pull(self, lane: _Lane, spans: list[tuple[int, int, int]]) -> None:
        card = lane.card
        if card is None or lane.handle is not None:
            raise ValueError("a lane was used out of turn")
        for source, target, size in spans:
            if not (0 <= source <= source + size <= card.num_bytes):
                raise ValueError("the peer offered what is not in its arena")
            if not (0 <= target <= target + size <= self._num_bytes):
                raise ValueError("a span is outside the arena")
        agent = self._agent
        here = agent.get_xfer_descs([(self._base + t, n, 0) for _, t, n in spans], "DRAM")
        there = agent.get_xfer_descs([(card.base + s, n, 0) for s, _, n in spans], "DRAM")
        lane.handle = agent.initialize_xfer("READ", here, there, lane.remote)
        self._settle(lane, agent.transfer(lane.handle))

    def _look_after(self, lane: _Lane) -> None:
        try:
            state = self._agent.check_xfer_state(lane.handle)
        except Exception as error:  # it says so when the peer has gone
            self._settle(lane, "ERR", f"{error}")
        else:
            self._settle(lane, state)

    def _settle(self, lane: _Lane, state: str, error: str = "it failed") -> None:
        if state == "PROC":
            return
        handle, lane.handle = lane.handle, None
        self._agent.release_xfer_handle(handle)
        self._answer(lane, "" if state == "DONE" else f"NIXL: {error}")

    def _answer(self, lane: _Lane, error: str = "") -> None:
        try:
            lane.sock.send(msgspec.msgpack.encode(Done(error=error[:1000])))
        except OSError:
            self._drop(lane)

    def _drop(self, lane: _Lane) -> None:
        """Its connection has ended. Whoever hangs up while a transfer runs ends this process."""
        fd = lane.sock.fileno()
        if fd < 0:
            return
        self._poll.unregister(fd)
        del self._lanes[fd]
        lane.sock.close()
        if lane.remote:
            self._users[lane.remote] -= 1
            if not self._users[lane.remote]:
                del self._users[lane.remote]
                self._agent.remove_remote_agent(lane.remote)


if __name__ == "__main__":
    main()
