"""How a supervisor becomes the supervisor of the code on disk, without an end of its children.

The next program is executed in the same process (`execv`): it keeps the process id, the children
and the file descriptors, and reads all other state from a memory file. Before that, the next head
has imported the new code, and a trial run has read the state. So code that does not start harms
nothing.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from moonpool.children.start import moonpool_line, start_child
from moonpool.link.packets import MAX_PACKET_BYTES, anonymous_file, packet_pair
from moonpool.protocol.supervision import FromHead, HeadLoaded, SupervisorState
from moonpool.types import InstanceId

LOAD_S = 120.0
TRIAL_S = 60.0
COMMAND = "next-supervisor"
_SAID_CHARS = 300


class SuccessionError(Exception):
    """The code on disk cannot continue; the text is one line."""


@dataclass
class NextHead:
    """A head that has imported its modules and waits for its first packet."""

    process: asyncio.subprocess.Process
    packets: socket.socket

    def end(self) -> None:
        if self.process.returncode is None:
            self.process.kill()
        self.packets.close()


async def load_head(environment: Mapping[str, str], with_engine: bool) -> NextHead:
    """Starts the next head as a new interpreter. Raises SuccessionError."""
    options = ("--engine",) if with_engine else ()
    ours, theirs = packet_pair()
    try:
        line = moonpool_line("head-process", *options, "--fd", str(theirs.fileno()))
        process = await start_child(line, environment, (theirs.fileno(),))
    except OSError as error:
        ours.close()
        raise SuccessionError(f"cannot start {sys.executable}: {error}") from None
    finally:
        theirs.close()
    found = NextHead(process, ours)
    ours.setblocking(False)
    try:
        async with asyncio.timeout(LOAD_S):
            body = await asyncio.get_running_loop().sock_recv(ours, MAX_PACKET_BYTES)
        if not body or not isinstance(msgspec.msgpack.decode(body, type=FromHead), HeadLoaded):
            raise SuccessionError("the next head does not start; its error is in the log above")
    except BaseException as error:
        found.end()
        if isinstance(error, TimeoutError):
            raise SuccessionError(f"the next head did not start within {LOAD_S:g} s") from None
        if isinstance(error, msgspec.MsgspecError | OSError):
            raise SuccessionError(f"the next head sent an unknown message: {error}") from None
        raise
    return found


async def try_state(state: SupervisorState) -> None:
    """Lets the next program read the state. Raises SuccessionError."""
    fd = _write(state)
    try:
        trial = await asyncio.create_subprocess_exec(
            *moonpool_line(COMMAND, "--fd", str(fd), "--trial"),
            stdin=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            pass_fds=(fd,),
        )
        try:
            async with asyncio.timeout(TRIAL_S):
                _, said = await trial.communicate()
        except TimeoutError:
            trial.kill()
            raise SuccessionError(f"a trial of it took longer than {TRIAL_S:g} s") from None
    except OSError as error:
        raise SuccessionError(f"cannot start {sys.executable}: {error}") from None
    finally:
        os.close(fd)
    if trial.returncode:
        lines = said.decode(errors="replace").strip().splitlines()
        raise SuccessionError(f"a trial of it failed: {(lines or [''])[-1][:_SAID_CHARS]}")


def become_next(state: SupervisorState) -> None:
    """Executes the next program in this process, so this call never returns. Raises OSError if the
    program cannot be executed."""
    fd = _write(state)
    passed = [fd, *state.fds]
    for number in passed:
        os.set_inheritable(number, True)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        line = moonpool_line(COMMAND, "--fd", str(fd))
        os.execv(sys.executable, line)  # noqa: S606 - our own program
    finally:
        for number in passed:
            os.set_inheritable(number, False)
        os.close(fd)


def read_state(fd: int) -> SupervisorState:
    """Reads the state that a supervisor has left. Raises SuccessionError."""
    try:
        with os.fdopen(fd, "rb") as file:
            file.seek(0)
            return msgspec.msgpack.decode(file.read(), type=SupervisorState)
    except (OSError, msgspec.MsgspecError) as error:
        raise SuccessionError(f"the state of the former supervisor is unknown: {error}") from None


def keep_private(state: SupervisorState) -> None:
    """Keeps the file descriptors of this process from programs that start later."""
    for fd in state.fds:
        os.set_inheritable(fd, False)


def _write(state: SupervisorState) -> int:
    fd = anonymous_file("moonpool-supervisor")
    with os.fdopen(os.dup(fd), "wb") as file:
        file.write(msgspec.msgpack.encode(state))
    return fd


class Succession(Protocol):
    """Replaces processes by processes that run the code on disk."""

    upgrade_error: str | None
    """Why the last upgrade was called off."""

    def replace(self, instance_id: InstanceId, from_disk: bool = True) -> None:
        """Lets another process replace the worker that is about to leave. `from_disk`: whether the
        new process runs the code on disk."""
        ...

    def upgrade(self) -> None:
        """Lets another head take this one's place."""
        ...


class NoSuccession:
    """The succession of a head without a supervisor, which replaces nothing."""

    upgrade_error: str | None = None

    def replace(self, instance_id: InstanceId, from_disk: bool = True) -> None:
        """Does nothing: whoever started the worker must start the next one."""

    def upgrade(self) -> None:
        self.upgrade_error = "this head has no supervisor"
