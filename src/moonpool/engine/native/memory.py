"""Memory for packed weights: large pages where the system gives them.

A decode step reads every weight once, in order. On 4 KiB pages that stream stops at each page end
for the prefetcher and the TLB; on 2 MiB pages it comes close to plain memory bandwidth.
Owns mappings that are never given back while a view of them lives. Knows nothing of layouts.
"""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20
ALIGN_BYTES = 64


class PackedMemory:
    """Hands out zeroed pieces of anonymous mappings; untouched pages cost nothing."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used_bytes = 0

    def take(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8, aligned to a cache line. Lives as long as the tensor does."""
        if num_bytes > self._chunk.numel() - self._used_bytes:
            self._chunk = _map(max(num_bytes, CHUNK_BYTES))
            self._used_bytes = 0
        piece = self._chunk[self._used_bytes : self._used_bytes + num_bytes]
        self._used_bytes += -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES
        return piece


def _map(num_bytes: int) -> Tensor:
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)
