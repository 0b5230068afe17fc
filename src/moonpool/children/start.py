"""Starts commands of moonpool as children of this process.

Each process has a separate session, so that Ctrl-C reaches only the process that started it, and
reads nothing from the terminal. The child itself makes sure that it ends with its parent
(`children.parent`).
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Mapping, Sequence


def moonpool_line(*words: str) -> list[str]:
    """The command line of a command of moonpool, in this Python."""
    return [sys.executable, "-m", "moonpool", *words]


async def start_child(
    line: Sequence[str], environment: Mapping[str, str], fds: Sequence[int] = ()
) -> asyncio.subprocess.Process:
    """Starts a program that inherits these descriptors. Raises OSError."""
    return await asyncio.create_subprocess_exec(
        *line,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=tuple(fds),
    )


def start_child_here(
    line: Sequence[str], environment: Mapping[str, str], fds: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Like `start_child`, for a process without an event loop."""
    return subprocess.Popen(  # noqa: S603 - our own command
        line,
        env=environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=tuple(fds),
    )
