"""The bytes of one instance's KVCache: `num_blocks` blocks in one anonymous, sealed memfd.

A memfd has no name, so nothing is left behind when the process is killed. It is mapped and
prefaulted once, then sealed: its size is fixed, and nobody who is handed the descriptor can write
through it. With the bytes go the checksums of the slices (`sums`).
Who owns which block is not decided here (`kvcache`), nor what lies in a slice (`engine`).
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
from pathlib import Path

from moonpool.kvcache.layout import BlockLayout
from moonpool.messenger.cut import Cut
from moonpool.messenger.sums import Sums

_MADV_POPULATE_WRITE = 23
_F_SEAL_FUTURE_WRITE = 0x10
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
_PREFAULT_STEP_BYTES = 64 << 20  # a step holds the GIL, so it must stay short
_GIB = float(1 << 30)


class ArenaError(Exception):
    """The arena cannot be had; the text says why in one line."""


class Arena:
    """Writable blocks of this process. Slice (block, layer) starts at
    `block * layout.block_bytes + layer * layout.slice_bytes`.

    An arena that other processes of the same instance shall write, too, is made with `sealed` false
    and sealed once they have mapped it; before that, no peer may be handed the descriptor."""

    def __init__(
        self,
        layout: BlockLayout,
        num_blocks: int,
        cut: Cut | None = None,
        sealed: bool = True,
    ) -> None:
        """With a `cut`, `layout` is of what is kept: that much of each slice of whole blocks."""
        if num_blocks < 1:
            raise ArenaError(f"an arena needs at least 1 block, got {num_blocks}")
        assert cut is None or cut.num_bytes == layout.slice_bytes
        self.layout = layout
        self.cut = cut
        self.num_blocks = num_blocks
        self.num_bytes = num_blocks * layout.block_bytes
        self.slice_bytes = layout.slice_bytes  # asked for too often to compute each time
        self.block_bytes = layout.block_bytes
        _check_memory(self.num_bytes)
        self.fd = os.memfd_create("moonpool-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.num_bytes)
            mapping = mmap.mmap(self.fd, self.num_bytes)
            if sealed:
                self.seal()
            _prefault(mapping, self.num_bytes)
        except OSError as error:
            os.close(self.fd)
            raise ArenaError(
                f"cannot set up an arena of {self.num_bytes / _GIB:.2f} GiB: {error}"
            ) from error
        self.buffer = memoryview(mapping)
        self.sums = Sums(num_blocks, layout.num_layers)

    def seal(self) -> None:
        """From here on its size is fixed, and nobody else can map it to write."""
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)

    def slice(self, block_id: int, layer: int) -> memoryview:
        """The slice's bytes, writable. The caller has checked that both numbers are in range."""
        start = self.place(block_id, layer)
        return self.buffer[start : start + self.slice_bytes]

    def place(self, block_id: int, layer: int) -> int:
        """Where the slice starts in `buffer`."""
        return block_id * self.block_bytes + layer * self.slice_bytes

    def holds(self, block_id: int) -> bool:
        return 0 <= block_id < self.num_blocks

    def close(self) -> None:
        """Gives the memory back, at once or when the last tensor or view over it is gone."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        # Not unmapped by force: torch.frombuffer keeps a reference but does not lock the buffer, so
        # a tensor that outlives the arena would read unmapped memory.
        self.buffer = memoryview(b"")


def available_memory_bytes(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """What this process can still take: of the machine, and of its cgroup (v2) and those above."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", (proc / "meminfo").read_text(), re.M)
    available = int(match.group(1)) * 1024 if match else 0
    try:
        own = re.search(r"^0::/(.*)$", (proc / "self/cgroup").read_text(), re.M)
    except OSError:
        own = None
    group = cgroup / own.group(1) if own else cgroup
    for folder in (group, *group.parents):
        left = _cgroup_left_bytes(folder)
        if left is not None:
            available = min(available, left)
        if folder == cgroup:
            break
    return available


def _cgroup_left_bytes(folder: Path) -> int | None:
    """None where the folder sets no limit. Cached file pages count as free: they can be dropped."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        used = int((folder / "memory.current").read_text())
        stat = (folder / "memory.stat").read_text()
    except (OSError, ValueError):
        return None
    if limit == "max":
        return None
    cached = re.search(r"^inactive_file (\d+)$", stat, re.M)
    return max(0, int(limit) - used + (int(cached.group(1)) if cached else 0))


def _check_memory(needed_bytes: int) -> None:
    available = available_memory_bytes()
    if needed_bytes > available:
        raise ArenaError(
            f"the KVCache arena needs {needed_bytes / _GIB:.2f} GiB but only"
            f" {available / _GIB:.2f} GiB of memory are available;"
            " lower pool.dram_tokens_per_instance or start fewer instances"
        )


def _prefault(mapping: mmap.mmap, num_bytes: int) -> None:
    """Touches all pages now: a first touch during a transfer is ten times slower than the copy."""
    for start in range(0, num_bytes, _PREFAULT_STEP_BYTES):
        length = min(_PREFAULT_STEP_BYTES, num_bytes - start)
        try:
            mapping.madvise(_MADV_POPULATE_WRITE, start, length)
        except OSError:  # kernels before 5.14
            for page in range(start, start + length, mmap.PAGESIZE):
                mapping[page] = 0
