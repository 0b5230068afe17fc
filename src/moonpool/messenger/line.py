"""The connection of one operation, as another thread sees it: something that can be broken off."""

from __future__ import annotations

import threading

from moonpool.messenger.transport import Connection


class Line:
    """Thread-safe. Once broken off, a connection it holds or will hold fails at its next use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._reason = ""

    def hold(self, connection: Connection) -> None:
        with self._lock:
            self._connection = connection
            if self._reason:
                connection.interrupt()

    def break_off(self, reason: str) -> None:
        with self._lock:
            self._reason = self._reason or reason
            if self._connection is not None:
                self._connection.interrupt()

    def let_go(self) -> None:
        """The operation is over: its connection may serve another, which is none of ours."""
        with self._lock:
            self._connection = None

    @property
    def broken(self) -> bool:
        with self._lock:
            return bool(self._reason)

    def explain(self, error: Exception) -> str:
        """Why the operation failed: because it was broken off, else what the transport said."""
        with self._lock:
            return self._reason or str(error)
