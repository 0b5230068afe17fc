"""Runs a wire between instances that can be slow, flip bits and break: one relay per instance.

Its threads only move bytes; the driver decides which faults occur and when.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time

CHUNK_BYTES = 32 << 10
HEAD_BYTES = 400
FRESH_FACTOR = 3
"""The smallest chunk that gets a flip. Smaller chunks are messages, which are a small part of all
bytes."""
MAX_CONNECTIONS = 512


class Relay:
    """Listens on `port` and forwards all bytes to the target, which may change."""

    def __init__(self, seed: int) -> None:
        self.target_port = 0
        self.slow_s = 0.0  # seconds to wait before each chunk
        self.flip_rate = 0.0  # of chunks
        self.flips = 0
        self.renewals = 0
        self._flip_next = False
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def flip_next(self) -> None:
        """Flips one bit of the next chunk that is large enough to carry blocks."""
        self._flip_next = True

    def close(self) -> None:
        self._listener.close()
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            try:
                far = socket.create_connection(("127.0.0.1", self.target_port), timeout=60.0)
            except OSError:
                near.close()
                continue
            for sock in (near, far):
                sock.settimeout(None)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                if len(self._open) >= 2 * MAX_CONNECTIONS:
                    near.close()
                    far.close()
                    continue
                self._open |= {near, far}
            for source, sink in ((near, far), (far, near)):
                threading.Thread(
                    target=self._pass_on, args=(source, sink), name="relay-pass", daemon=True
                ).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        num_bytes, fresh = 0, True
        try:
            while data := source.recv(CHUNK_BYTES):
                self.renewals += data.count(b"ReadRenewed")
                if self.slow_s:
                    time.sleep(self.slow_s * self._rng.random() * 2)
                sink.sendall(self._spoil(data, num_bytes, fresh))
                num_bytes += len(data)
                fresh = len(data) < CHUNK_BYTES
        except OSError:
            pass
        for sock in (source, sink):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        with self._lock:
            if source in self._open:  # each direction closes its own source
                self._open.discard(source)
                source.close()

    def _spoil(self, data: bytes, num_before: int, fresh: bool) -> bytes:
        """Flips a bit, but not in the handshake, where a flip would only be refused. `fresh` says
        that a message may begin here."""
        armed = self._flip_next and len(data) >= CHUNK_BYTES // 4
        rate = self.flip_rate * (FRESH_FACTOR if fresh else 1)
        drawn = rate and num_before > 1000 and self._rng.random() < rate
        if not armed and not drawn:
            return data
        self._flip_next = self._flip_next and not armed
        self.flips += 1
        spoiled = bytearray(data)
        end = min(HEAD_BYTES, len(data)) if fresh else len(data)
        at = len(data) // 2 if armed else self._rng.randrange(end)
        spoiled[at] ^= 1 << self._rng.randrange(8)
        return bytes(spoiled)
