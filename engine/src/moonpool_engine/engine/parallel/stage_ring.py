"""Activations from one stage to the next: a ring of slots in shared memory.

A byte on the socket from writer to reader means that a slot is full; a byte back means that it is
free. Both sides sleep while they wait, the system calls order the memory accesses, and end of file
means that the neighbour has ended. A tensor larger than a slot takes several slots. A writer that
is a whole ring ahead waits for the reader. The data carries no description: both sides know each
tensor's shape.
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
    """The neighbouring stage has ended."""


@dataclass(frozen=True, slots=True)
class RingSize:
    """Both sides of a ring must use one size."""

    slot_bytes: int
    num_slots: int

    @property
    def num_bytes(self) -> int:
        return self.slot_bytes * self.num_slots


def create_ring(size: RingSize) -> int:
    """Returns a descriptor of anonymous memory for a ring."""
    fd = os.memfd_create("moonpool-ring", os.MFD_CLOEXEC)
    os.ftruncate(fd, size.num_bytes)
    return fd


class RingEnd:
    """One side of a ring, which uses either `write` or `read`. Takes over `fd` and the socket."""

    def __init__(self, fd: int, sock: socket.socket, size: RingSize, writes: bool) -> None:
        self._slots = np.frombuffer(mmap.mmap(fd, size.num_bytes), np.uint8).reshape(
            size.num_slots, size.slot_bytes
        )
        os.close(fd)
        self._sock = sock
        self._ready = size.num_slots if writes else 0  # number of slots that this side may use now
        self._next = 0

    def write(self, tensor: Tensor) -> None:
        """Sends a tensor of any shape and device. Raises RingError."""
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
        """Makes waiting calls on both sides raise RingError. Any thread may call it."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # the neighbour has already closed the connection

    def close(self) -> None:
        """Closes the socket. No other thread may still use the ring."""
        self._sock.close()

    def _pieces(self, tensor: Tensor) -> list[np.ndarray[tuple[int], np.dtype[np.uint8]]]:
        flat = tensor.contiguous().view(uint8).view(-1).numpy()
        size = self._slots.shape[1]
        return [flat[start : start + size] for start in range(0, len(flat), size)]

    def _take(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        """Waits for the next slot."""
        if not self._ready:
            try:
                self._ready = len(self._sock.recv(len(self._slots)))
            except OSError as error:
                raise RingError(f"the neighbouring stage has ended: {error}") from None
            if not self._ready:
                raise RingError("the neighbouring stage has ended")
        self._ready -= 1
        slot: np.ndarray[tuple[int], np.dtype[np.uint8]] = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        return slot

    def _give(self) -> None:
        try:
            self._sock.sendall(_SLOT)
        except OSError as error:
            raise RingError(f"the neighbouring stage has ended: {error}") from None
