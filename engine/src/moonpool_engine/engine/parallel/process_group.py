"""The further processes of an instance: other pipeline stages, or other tensor ranks.

This module holds what stages and ranks share, on both sides of the control socket. The first
process starts a peer (`start_peer`) and keeps a `PeerProcess`; the peer runs `run_peer`.

A peer inherits one end of a socket pair, so no secret is needed. A stage or rank receives the
descriptors of the arena and of its other memory through that socket, and exits when the socket
closes.
"""

from __future__ import annotations

import gc
import logging
import mmap
import os
import select
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec
import torch

from moonpool.children.start import moonpool_line, start_child_here
from moonpool.framing import FrameTooLongError
from moonpool.protocol.block_layout import BlockLayout
from moonpool_engine.engine.ops import KvCache, block_dtype
from moonpool_engine.engine.parallel.spare_process import SpareProcess, begin_spare
from moonpool_engine.engine.parallel.stage_ring import RingSize, create_ring
from moonpool_engine.engine.parallel.stage_wire import (
    FromFirst,
    Inbox,
    RankSetup,
    StageArriving,
    StageFailed,
    StageReady,
    StageSetup,
    StageStep,
    frame,
    receive_order,
    receive_setup,
)

READY_S = 300.0
END_S = 3.0
log = logging.getLogger("moonpool.peer")


class StageLostError(Exception):
    """A stage or rank did not start, or has ended; the instance cannot continue without it."""


# The first process's side


@dataclass(frozen=True, slots=True)
class StagePlace:
    """The layers of one stage, the cores it computes on ((): any), and its device."""

    layers: range
    cores: tuple[int, ...]
    device: str


class PeerProcess:
    """The first process's handle on another stage or rank."""

    def __init__(
        self, name: str, process: subprocess.Popen[bytes] | SpareProcess, control: socket.socket
    ) -> None:
        self.name = name
        self.process = process
        self.control = control

    def send(self, message: FromFirst) -> None:
        """Blocks while the peer is far behind. Raises OSError if the peer has ended."""
        self.control.sendall(frame(message))

    def wait_until_ready(self) -> None:
        """Raises StageLostError."""
        inbox = Inbox()
        self.control.settimeout(READY_S)
        try:
            while data := self.control.recv(1 << 12):
                for answer in inbox.feed(data):
                    if isinstance(answer, StageFailed):
                        raise StageLostError(f"{self.name} cannot start: {answer.message}")
                    assert isinstance(answer, StageReady)
                    self.control.settimeout(None)
                    return
        except TimeoutError:
            raise StageLostError(f"{self.name} was not ready within {READY_S:.0f} s") from None
        except (OSError, FrameTooLongError) as error:
            raise StageLostError(f"{self.name} ended while it started: {error}") from None
        raise StageLostError(f"{self.name} ended while it started; see the log above")

    def ask_to_end(self) -> None:
        """Closes the connection, which ends the peer."""
        try:
            self.control.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the process has already ended

    def end(self, by_s: float) -> None:
        """Waits until the peer has ended; kills it after `by_s` (`time.monotonic`)."""
        try:
            self.process.wait(max(by_s - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.control.close()


def start_peer(
    name: str,
    command: Sequence[str],
    setup: StageSetup | RankSetup,
    fds: Sequence[int],
    threads: int,
) -> PeerProcess:
    """Runs `moonpool` with `command`, in a spare process if there is one. Sends it the setup and
    the descriptors `fds`."""
    control, inherited = socket.socketpair()
    number = str(threads)
    with inherited:
        process: subprocess.Popen[bytes] | SpareProcess | None
        process = begin_spare([*command, "--control-fd"], inherited.fileno())
        process = process or start_child_here(
            moonpool_line(*command, "--control-fd", str(inherited.fileno())),
            os.environ | {"OMP_NUM_THREADS": number, "MKL_NUM_THREADS": number},
            (inherited.fileno(),),
        )
    socket.send_fds(control, [frame(setup)], list(fds))
    return PeerProcess(name, process, control)


def start_stages(
    setup: StageSetup,
    stages: Sequence[StagePlace],
    arena_fd: int,
    owner: str,
) -> tuple[list[PeerProcess], int, socket.socket]:
    """Starts the stages after the first one and connects each to the next by a ring.

    Returns their handles, and the memory and the socket of the ring from the first stage to the
    second. The stages load their weights while the caller continues.
    """
    peers: list[PeerProcess] = []
    size = RingSize(setup.slot_bytes, setup.num_slots)
    first_fd = create_ring(size)
    first_sock, before_sock = socket.socketpair()
    before_fd = os.dup(first_fd)
    for number, place in enumerate(stages, 2):
        name = f"stage {number} of {len(stages) + 1}"
        command = ["stage", "--of", owner, "--number", str(number)]
        fds = [arena_fd, before_fd, before_sock.fileno()]
        last = number == len(stages) + 1
        if not last:
            after_fd = create_ring(size)
            after_sock, next_sock = socket.socketpair()
            fds += [after_fd, after_sock.fileno()]
        own = msgspec.structs.replace(
            setup,
            first_layer=place.layers.start,
            end_layer=place.layers.stop,
            cores=place.cores,
            device=place.device,
        )
        peers.append(start_peer(name, command, own, fds, setup.threads))
        os.close(before_fd)
        before_sock.close()
        if not last:
            after_sock.close()
            before_fd, before_sock = after_fd, next_sock
    return peers, first_fd, first_sock


# The peer's side


class Peer(Protocol):
    """A stage or a rank, made from its setup."""

    def join(self) -> None:
        """Called once, after the first process has received that this peer is ready."""
        ...

    def handle(self, order: StageStep | StageArriving) -> None:
        """Raises ConnectionError or StageLostError if another process has ended."""
        ...


_Setup = TypeVar("_Setup", StageSetup, RankSetup)


def run_peer(
    control: socket.socket,
    num_fds: int,
    kind: type[_Setup],
    make: Callable[[_Setup, list[int]], Peer],
) -> None:
    """Serves the first process, at the other end of `control`, until that process ends.

    `make` receives the setup and the descriptors that were sent with it.
    """
    threading.Thread(target=_end_with, args=(control,), name="watch", daemon=True).start()
    try:
        setup, fds = receive_setup(control, num_fds, kind)
        try:
            peer = make(setup, fds)
        except (ValueError, OSError, MemoryError) as error:
            control.sendall(frame(StageFailed(message=str(error))))
            return
        control.sendall(frame(StageReady()))
        peer.join()
        gc.collect()
        gc.freeze()
        while True:
            peer.handle(receive_order(control))
    except (ConnectionError, FrameTooLongError, StageLostError) as error:
        # a RingError is a ConnectionError
        log.info("ending: %s", error)


def _end_with(control: socket.socket) -> None:
    """Ends this process as soon as the first one ends, even in the middle of a step."""
    poll = select.poll()
    poll.register(control, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def pin(cores: tuple[int, ...]) -> None:
    """Pins the calling thread and the threads it starts later. Logs if the system refuses."""
    try:
        if cores:
            os.sched_setaffinity(0, cores)
    except OSError as error:
        log.info("not pinned to cores %s: %s", cores, error.strerror)


def map_arena(fd: int, layout: BlockLayout, num_blocks: int) -> KvCache:
    """Maps the first process's arena and closes `fd`.

    blocks: [num_blocks, num_layers, slice_elements], of `block_dtype`.
    """
    try:
        mapping = mmap.mmap(fd, num_blocks * layout.block_bytes)
    finally:
        os.close(fd)
    shape = (num_blocks, layout.num_layers, layout.slice_elements)
    flat = torch.frombuffer(mapping, dtype=block_dtype(layout))
    return KvCache(flat.view(shape), layout)
