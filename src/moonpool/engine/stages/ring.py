"""Activations from one stage to the next: a ring of slots in memory that both have mapped.

A byte on the socket from writer to reader says that a slot is full, one the other way that it is
free again: so both sleep while they wait, the system calls order the accesses, and the end of file
says that the neighbour is gone. What does not fit a slot goes through several; a writer that is a
whole ring ahead waits. Both sides must agree on what is sent: nothing describes it.
"""

from __future__ import annotations

import mmap
import os
import socket
from dataclasses import dataclass

import numpy as np
from torch import Tensor, uint8

_SLOT = b"\0"


class RingError(ConnectionError):
    """The neighbour is gone."""


@dataclass(frozen=True, slots=True)
class RingSize:
    slot_bytes: int
    num_slots: int

    @property
    def num_bytes(self) -> int:
        return self.slot_bytes * self.num_slots


def create_ring(size: RingSize) -> int:
    """A descriptor of memory for a ring, which has no name."""
    fd = os.memfd_create("moonpool-ring", os.MFD_CLOEXEC)
    os.ftruncate(fd, size.num_bytes)
    return fd


class RingEnd:
    """One side of a ring; each uses either `write` or `read`. Takes `fd` and the socket over."""

    def __init__(self, fd: int, sock: socket.socket, size: RingSize, writes: bool) -> None:
        self._slots = np.frombuffer(mmap.mmap(fd, size.num_bytes), np.uint8).reshape(
            size.num_slots, size.slot_bytes
        )
        os.close(fd)
        self._sock = sock
        self._ready = size.num_slots if writes else 0  # slots that are ours now
        self._next = 0

    def write(self, tensor: Tensor) -> None:
        """Of any device. Raises RingError."""
        for piece in self._pieces(tensor.cpu()):
            slot = self._take()
            np.copyto(slot[: len(piece)], piece)
            self._give()

    def read(self, tensor: Tensor) -> None:
        """Fills a contiguous `tensor`. Raises RingError."""
        for piece in self._pieces(tensor):
            slot = self._take()
            np.copyto(piece, slot[: len(piece)])
            self._give()

    def interrupt(self) -> None:
        """From any thread: whoever waits gets a RingError."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the neighbour was faster

    def close(self) -> None:
        """Only when nobody uses it any more."""
        self._sock.close()

    def _pieces(self, tensor: Tensor) -> list[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
        flat = tensor.contiguous().view(uint8).view(-1).numpy()
        size = self._slots.shape[1]
        return [flat[start : start + size] for start in range(0, len(flat), size)]

    def _take(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """The next slot, once it is ours."""
        if not self._ready:
            try:
                self._ready = len(self._sock.recv(len(self._slots)))
            except OSError as error:
                raise RingError(f"the neighbour is gone: {error}") from None
            if not self._ready:
                raise RingError("the neighbour is gone")
        self._ready -= 1
        slot: np.ndarray[tuple[int], np.dtype[np.uint8]] = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        return slot

    def _give(self) -> None:
        try:
            self._sock.sendall(_SLOT)
        except OSError as error:
            raise RingError(f"the neighbour is gone: {error}") from None
