"""The server that started a helper process, as the helper sees it (see `HelperProcess`)."""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import BinaryIO

from moonpool.children.parent import end_with
from moonpool.framing import Framing

FRAMES = Framing("<", max_bytes=1 << 30)


class Parent:
    """The server, with which frames are exchanged, each of 4 length bytes and a body."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._source = source
        self._sink = sink

    def receive(self) -> bytes | None:
        """Returns the next frame, or None at the end of the input."""
        try:
            return FRAMES.read(self._source.read)
        except EOFError:
            return None

    def send(self, body: bytes) -> None:
        FRAMES.write(self._sink, body)


def join_parent(pid: int) -> Parent:
    """Must be called before anything else, with the process id of the server. This process then
    ends with its parent, Ctrl-C does not reach it, and it writes no core file. The output of
    libraries does not get between the frames.
    """
    end_with(pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    parent = Parent(os.fdopen(0, "rb"), os.fdopen(1, "wb"))
    sys.stdout = sys.stderr
    return parent
