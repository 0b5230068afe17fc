"""Counters of a messenger's transfers, for /metrics."""

from __future__ import annotations

import threading

from moonpool.types import Struct


class TransferCounts(Struct, frozen=True):
    """A snapshot of the counters. Dict keys are transport names (shm, tcp, tls, nixl)."""

    sent_bytes: dict[str, int]
    received_bytes: dict[str, int]
    sent_slices: int
    received_slices: int
    corrupt_slices: int
    failed_operations: int
    refused_connections: int


class Counters:
    """Running totals, which are never reset. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent_bytes: dict[str, int] = {}
        self._received_bytes: dict[str, int] = {}
        self._sent_slices = 0
        self._received_slices = 0
        self._corrupt_slices = 0
        self._failed_operations = 0
        self._refused_connections = 0

    def sent(self, transport: str, num_slices: int, num_bytes: int) -> None:
        with self._lock:
            self._sent_bytes[transport] = self._sent_bytes.get(transport, 0) + num_bytes
            self._sent_slices += num_slices

    def received(self, transport: str, num_slices: int, num_bytes: int, num_corrupt: int) -> None:
        with self._lock:
            self._received_bytes[transport] = self._received_bytes.get(transport, 0) + num_bytes
            self._received_slices += num_slices
            self._corrupt_slices += num_corrupt

    def found_corrupt(self, num_slices: int) -> None:
        """Counts corrupt slices in our own memory, found after a reader's report."""
        with self._lock:
            self._corrupt_slices += num_slices

    def failed(self) -> None:
        """Counts a failed operation."""
        with self._lock:
            self._failed_operations += 1

    def refused(self) -> None:
        """Counts a refused connection."""
        with self._lock:
            self._refused_connections += 1

    def counts(self) -> TransferCounts:
        with self._lock:
            return TransferCounts(
                sent_bytes=dict(self._sent_bytes),
                received_bytes=dict(self._received_bytes),
                sent_slices=self._sent_slices,
                received_slices=self._received_slices,
                corrupt_slices=self._corrupt_slices,
                failed_operations=self._failed_operations,
                refused_connections=self._refused_connections,
            )
