"""What a helper process knows of the server that started it (see `HelperProcess`)."""

from __future__ import annotations

import resource
import signal
import struct
import sys
from typing import BinaryIO

from moonpool.link.parent import end_with

LENGTH = struct.Struct("<I")


class Parent:
    """The server: frames come from it and go to it, each of 4 length bytes and a body."""

    def __init__(self, source: BinaryIO, sink: BinaryIO) -> None:
        self._source = source
        self._sink = sink

    def receive(self) -> bytes | None:
        """Returns the next frame; None at the end."""
        head = self._source.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack(head)
        body = self._source.read(length)
        return body if len(body) == length else None

    def send(self, body: bytes) -> None:
        self._sink.write(LENGTH.pack(len(body)) + body)
        self._sink.flush()


def join_parent() -> Parent:
    """Called first of all. This process then ends with the server, Ctrl-C does not reach it, and it
    writes no core file. What libraries print does not get between the frames."""
    end_with(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    parent = Parent(sys.stdin.buffer, sys.stdout.buffer)
    sys.stdout = sys.stderr
    return parent
