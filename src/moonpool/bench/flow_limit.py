"""A path that grants each TCP connection no more than a rate, as clouds do: a relay to the real
address, whose kernel paces what it sends."""

from __future__ import annotations

import contextlib
import socket
import threading

SO_MAX_PACING_RATE = 47  # asm-generic/socket.h; Python does not name it
_CHUNK_BYTES = 256 << 10


class FlowLimit:
    """Relays what comes to `port` on the loopback, until closed. Answers are paced, one
    connection at a time; questions are not."""

    def __init__(self, host: str, port: int, bytes_per_s: int) -> None:
        self._target = host, port
        self._listener = socket.create_server(("127.0.0.1", 0))
        # What is accepted has it too.
        self._listener.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, bytes_per_s)
        self.port: int = self._listener.getsockname()[1]
        self.num_accepted = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._target)
                self.num_accepted += 1
                for pair in ((near, far), (far, near)):
                    pair[1].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=_pass_on, args=pair, daemon=True).start()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with contextlib.suppress(OSError):
        while count := source.recv_into(buffer):
            target.sendall(buffer[:count])
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_RDWR)
    with contextlib.suppress(OSError):
        source.shutdown(socket.SHUT_RDWR)
