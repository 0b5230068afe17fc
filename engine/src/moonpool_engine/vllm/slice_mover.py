"""Copies slices of KVCache blocks between addresses of this process, and computes their
checksums."""

from __future__ import annotations

import ctypes
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from moonpool_engine.engine.native.slices import NativeSliceCalls, open_slices
from moonpool_engine.vllm.cache_layout import Addresses

Sums = npt.NDArray[np.uint64]


class SliceMover(Protocol):
    """Copies slices. The caller guarantees that each address has `slice_bytes` bytes until the call
    returns, and that no target overlaps another slice."""

    device_types: ClassVar[tuple[str, ...]]
    """Kinds of devices, by torch's names, whose memory it can address."""

    def copy(self, from_addresses: Addresses, to_addresses: Addresses, slice_bytes: int) -> Sums:
        """Copies slice i from `from_addresses[i]` to `to_addresses[i]`.

        Returns the xxh3_64 of the bytes that were copied, for each slice. Targets are multiples of
        64, and so is `slice_bytes`, which is at least 256. Raises ValueError for other addresses or
        sizes.
        """
        ...


class PlainSliceMover:
    """Needs no compiled kernels."""

    device_types: ClassVar[tuple[str, ...]] = ("cpu",)

    def copy(self, from_addresses: Addresses, to_addresses: Addresses, slice_bytes: int) -> Sums:
        import xxhash  # imported here because vLLM's process only needs it for this class

        _check(from_addresses, to_addresses, slice_bytes)
        sums = np.empty(len(from_addresses), dtype=np.uint64)
        pairs = zip(from_addresses.tolist(), to_addresses.tolist(), strict=True)
        for i, (source, target) in enumerate(pairs):
            data = ctypes.string_at(source, slice_bytes)
            ctypes.memmove(target, data, slice_bytes)
            sums[i] = xxhash.xxh3_64_intdigest(data)
        return sums


class NativeSliceMover:
    """Copies and computes checksums in one pass over memory. The native calls release the GIL."""

    device_types: ClassVar[tuple[str, ...]] = ("cpu",)

    def __init__(self, calls: NativeSliceCalls) -> None:
        self._move = calls.move

    def copy(self, from_addresses: Addresses, to_addresses: Addresses, slice_bytes: int) -> Sums:
        _check(from_addresses, to_addresses, slice_bytes)
        sources = np.ascontiguousarray(from_addresses)
        targets = np.ascontiguousarray(to_addresses)
        sums = np.empty(len(sources), dtype=np.uint64)
        where = (array.ctypes.data for array in (sources, targets, sums))
        self._move(*where, len(sources), slice_bytes)
        return sums


def open_mover() -> SliceMover:
    """Returns the native mover, or the plain one if the kernels are not built or do not load."""
    calls = open_slices()
    if calls is None:
        return PlainSliceMover()
    return NativeSliceMover(calls)


def _check(from_addresses: Addresses, to_addresses: Addresses, slice_bytes: int) -> None:
    if from_addresses.dtype != np.uint64 or to_addresses.dtype != np.uint64:
        raise ValueError("addresses of slices are uint64")
    if len(from_addresses) != len(to_addresses):
        raise ValueError(f"{len(from_addresses)} slices for {len(to_addresses)} places")
    if slice_bytes < 256 or slice_bytes % 64:
        raise ValueError(f"a slice has at least 256 bytes, a multiple of 64, not {slice_bytes}")
    if np.any(to_addresses % np.uint64(64)):
        raise ValueError("slices go to multiples of 64 bytes")
