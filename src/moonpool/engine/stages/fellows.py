"""The processes of the other stages (or ranks): started, wired to each other, and ended.

A stage inherits one end of a socket pair, which makes it ours without a secret, and gets the arena
and its rings through it as descriptors. When that socket closes, it ends.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from moonpool.engine.stages.ring import RingSize, create_ring
from moonpool.engine.stages.wire import (
    FromFirst,
    Inbox,
    RankSetup,
    StageFailed,
    StageReady,
    StageSetup,
    frame,
)

READY_S = 300.0
END_S = 3.0


@dataclass(frozen=True, slots=True)
class StagePlace:
    """What a stage has of the model, and what it computes on."""

    layers: range
    cores: tuple[int, ...]
    device: str


class StageLostError(Exception):
    """A stage or rank did not come up, or has ended: the instance cannot go on without it."""


class Fellow:
    """One other stage, seen from the first."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self.name = name
        self.process = process
        self.control = control

    def send(self, message: FromFirst) -> None:
        """Waits while the stage is far behind. Raises OSError when it is gone."""
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
        except OSError as error:
            raise StageLostError(f"{self.name} ended while it started: {error}") from None
        raise StageLostError(f"{self.name} ended while it started; see the log above")

    def hang_up(self) -> None:
        """Tells it to end."""
        try:
            self.control.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it has ended already

    def end(self, by_s: float) -> None:
        """Until it is gone, killed if it has not ended by then (`time.monotonic`)."""
        try:
            self.process.wait(max(by_s - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.control.close()


def start_fellow(
    name: str,
    command: Sequence[str],
    setup: StageSetup | RankSetup,
    fds: Sequence[int],
    threads: int,
) -> Fellow:
    """A process of `moonpool` that gets its setup, and descriptors, by the socket it inherits."""
    control, theirs = socket.socketpair()
    number = str(threads)
    with theirs:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter
            [sys.executable, "-m", "moonpool", *command, "--control-fd", str(theirs.fileno())],
            env=os.environ | {"OMP_NUM_THREADS": number, "MKL_NUM_THREADS": number},
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,  # Ctrl-C is for the head
        )
    socket.send_fds(control, [frame(setup)], list(fds))
    return Fellow(name, process, control)


def start_fellows(
    setup: StageSetup,
    stages: Sequence[StagePlace],
    arena_fd: int,
    owner: str,
) -> tuple[list[Fellow], int, socket.socket]:
    """The stages at these places, in a row; and memory and socket of the ring to
    the first of them. They load their weights while the caller goes on."""
    fellows: list[Fellow] = []
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
        fellows.append(start_fellow(name, command, own, fds, setup.threads))
        os.close(before_fd)
        before_sock.close()
        if not last:
            after_sock.close()
            before_fd, before_sock = after_fd, next_sock
    return fellows, first_fd, first_sock
