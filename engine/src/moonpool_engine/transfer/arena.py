"""The memory of KVCache blocks: this instance's own arena, and peers' arenas mapped read-only.

An arena holds `num_blocks` blocks in one memory file, by default an anonymous memfd. A memfd has no
name, so nothing is left behind when the process is killed. The memory is mapped once, then sealed:
its size is fixed, and a process that gets the descriptor cannot write through it. Its pages are
touched at the start, or shortly before their first use (`transfer.touch_ahead`). The arena also
stores the checksums of its slices. `kvcache` decides which request owns a block, and `engine`
defines the content of a slice.

A memory file that outlives the process (`storage.kept_memory`) cannot be sealed against writing,
because the next process must write it. Peers get a descriptor that is open for reading only.

A peer's arena on the same host is mapped once and stays mapped while any connection to the peer
lives. A copy from a mapping costs what memcpy costs; a read through the descriptor pays the kernel
for each page, and a new mapping for each transfer would cost more than either. The seals make the
mapping safe: the file can neither shrink nor be written through the mapping, so an invalid offer of
a peer fails the check of its offset and never raises SIGBUS. A file without seals is mapped only if
it belongs to the same user and is closed to others; processes of this user could also kill this
one.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import re
import stat
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import xxhash

from moonpool.protocol.block_layout import BlockLayout
from moonpool.types import BlockId
from moonpool_engine.transfer.errors import ProtocolError
from moonpool_engine.transfer.reshard import ShardView
from moonpool_engine.transfer.touch_ahead import MADV_POPULATE_WRITE, TouchAhead
from moonpool_engine.transfer.wire import MAX_DEFERRED_CHECKSUMS, SliceOffer

Checksum = Callable[[memoryview], int]
checksum_slice: Checksum = xxhash.xxh3_64_intdigest

_SliceNumbers = np.ndarray[tuple[int], np.dtype[np.int64]]
_OFFERS = np.dtype([("index", "<i8"), ("layer", "<i8"), ("block", "<i8"), ("checksum", "<u8")])


class SliceChecksums:
    """The known checksums (xxh3_64) of an arena's slices. Thread-safe. Takes 8 bytes per slice.

    A checksum is computed once, when the slice is first received or first sent, and kept until the
    slice is written again. The stored checksum is sent with the slice, not one computed at that
    moment, so a reader detects if the source's memory changed after the block was computed. Every
    writer of the arena calls `forget` first: the engine for the blocks of a step, the messenger and
    the store for the blocks they fill. A writer that fails to do so causes a checksum mismatch: a
    cache miss, never a wrong answer.

    A checksum of 0 means unknown. A slice whose checksum happens to be 0 is hashed each time."""

    def __init__(self, num_blocks: int, num_layers: int) -> None:
        self.num_layers = num_layers
        self._checksums = array("Q", bytes(8 * num_blocks * num_layers))
        self._unknown_block = array("Q", bytes(8 * num_layers))

    @property
    def address(self) -> int:
        """The memory address of the checksums, ordered by slice number, for native code."""
        return self._checksums.buffer_info()[0]

    def get(self, block_id: BlockId, layer: int) -> int:
        """Returns the slice's xxh3_64, or 0 if it is unknown."""
        return self._checksums[block_id * self.num_layers + layer]

    def get_block(self, block_id: BlockId) -> array[int]:
        """Returns the checksums of a block's slices, of which unknown ones are 0."""
        start = block_id * self.num_layers
        return self._checksums[start : start + self.num_layers]

    def set(self, block_id: BlockId, layer: int, checksum: int) -> None:
        """Stores the checksum of a slice. The slice's bytes must be complete, and the same that
        were hashed."""
        self._checksums[block_id * self.num_layers + layer] = checksum

    def set_slice(self, number: int, checksum: int) -> None:
        """Stores the checksum of the slice with this number in the arena."""
        self._checksums[number] = checksum

    def get_many(self, numbers: np.ndarray) -> np.ndarray:
        """Returns uint64 checksums for int64 slice numbers."""
        found: np.ndarray = np.frombuffer(self._checksums, np.uint64)[numbers]
        return found

    def set_many(self, numbers: np.ndarray, checksums: np.ndarray) -> None:
        """Stores uint64 checksums for int64 slice numbers."""
        np.frombuffer(self._checksums, np.uint64)[numbers] = checksums

    def forget(self, block_ids: Iterable[BlockId]) -> None:
        """Drops the checksums of blocks that are about to be written."""
        num_layers = self.num_layers
        for block_id in block_ids:
            start = block_id * num_layers
            self._checksums[start : start + num_layers] = self._unknown_block


class DeferredChecksums:
    """The slices of one stream that were offered without a checksum, as one of both sides knows
    them.

    Within a host the receiver computes these checksums while it copies, and returns them at the end
    of the stream, so that the bytes are read once, not twice. The sender leaves the slices
    unchanged until then, or closes the connection first. Reads always carry checksums: their lease
    may expire.

    Both sides note these slices in the order of the offers, up to the number that one message
    holds. A sender that gets no checksum for a slice stores none, and hashes the slice the next
    time it sends it. One thread uses `DeferredChecksums`."""

    def __init__(self, checksums: SliceChecksums) -> None:
        """`checksums`: the checksums of this side's arena."""
        self._checksums = checksums
        self._numbers: list[_SliceNumbers] = []
        self._count = 0

    def note_sent(self, offers: bytes) -> None:
        """Notes slices of this side's own blocks."""
        found = _without_checksum(offers)
        if len(found):
            self._note(found["block"] * self._checksums.num_layers + found["layer"])

    def note_received(self, offers: bytes, blocks: array[int], first_index: int) -> None:
        """Notes slices that were received and hashed. Index `first_index + i` went to
        `blocks[i]`."""
        found = _without_checksum(offers)
        if len(found):
            targets = np.frombuffer(blocks, np.int64)[found["index"] - first_index]
            self._note(targets * self._checksums.num_layers + found["layer"])

    def encode(self) -> bytes:
        """Returns the receiver's checksums of the noted slices, for the sender."""
        return self._checksums.get_many(self._all()).astype("<u8").tobytes()

    def apply(self, checksums: bytes) -> None:
        """Stores the checksums that the receiver returned. Raises ProtocolError if their number
        differs from the number of slices sent without one."""
        numbers = self._all()
        if len(checksums) != 8 * len(numbers):
            raise ProtocolError(f"{len(checksums)} bytes of checksums of {len(numbers)} slices")
        self._checksums.set_many(numbers, np.frombuffer(checksums, "<u8"))

    def _note(self, numbers: _SliceNumbers) -> None:
        numbers = numbers[: MAX_DEFERRED_CHECKSUMS - self._count]
        self._count += len(numbers)
        self._numbers.append(numbers)

    def _all(self) -> _SliceNumbers:
        return np.concatenate(self._numbers) if self._numbers else np.zeros(0, np.int64)


def has_deferred(offers: bytes) -> bool:
    """Whether any of these packed offers lacks its checksum."""
    return len(_without_checksum(offers)) > 0


def _without_checksum(offers: bytes) -> np.ndarray:
    unpacked = np.frombuffer(offers, _OFFERS)
    found: np.ndarray = unpacked[unpacked["checksum"] == 0]
    return found


_F_SEAL_FUTURE_WRITE = 0x10
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE
_PREFAULT_STEP_BYTES = 64 << 20  # each step holds the GIL, so it must stay short
_GIB = float(1 << 30)


class ArenaError(Exception):
    """An arena cannot be created, mapped or read; the text is one line."""


class Arena:
    """The blocks of this process, which it may write. Slice (block, layer) starts at `block *
    layout.block_bytes + layer * layout.slice_bytes`.

    If other processes of the instance write the arena too, create it with `sealed` false and seal
    it once they have mapped it. Do not give a peer the descriptor before that."""

    def __init__(
        self,
        layout: BlockLayout,
        num_blocks: int,
        shard_view: ShardView | None = None,
        sealed: bool = True,
        kept_fd: int | None = None,
        late: bool = False,
    ) -> None:
        """With a `shard_view`, the arena stores that part of each slice of whole blocks, and
        `layout` describes the stored part. `kept_fd`: a memory file that is large enough and
        outlives the arena, which uses the file's content and closes the descriptor at its end.
        `late`: whether to take the memory of blocks only when `reach` announces them."""
        if num_blocks < 1:
            raise ArenaError(f"an arena needs at least 1 block, got {num_blocks}")
        assert shard_view is None or shard_view.num_bytes == layout.slice_bytes
        self.layout = layout
        self.shard_view = shard_view
        self.num_blocks = num_blocks
        self.num_bytes = num_blocks * layout.block_bytes
        # kept because it is read too often to be computed each time
        self.slice_bytes = layout.slice_bytes
        self.block_bytes = layout.block_bytes
        self._kept = kept_fd is not None
        if kept_fd is None:
            check_memory(self.num_bytes)
            kind = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
            self.fd = os.memfd_create("moonpool-arena", kind)
        else:
            self.fd = kept_fd
        self.peer_fd = self.fd
        """The descriptor for peers, which cannot write through it once the arena is sealed."""
        try:
            if kept_fd is None:
                os.ftruncate(self.fd, self.num_bytes)
            else:
                self.peer_fd = os.open(f"/proc/self/fd/{kept_fd}", os.O_RDONLY | os.O_CLOEXEC)
            mapping = mmap.mmap(self.fd, self.num_bytes)
            if sealed:
                self.seal()
            if not late:
                _prefault(mapping, self.num_bytes)
        except OSError as error:
            self._close_files()
            raise ArenaError(
                f"cannot set up an arena of {self.num_bytes / _GIB:.2f} GiB: {error}"
            ) from error
        self._mapping: mmap.mmap | None = mapping
        self._ahead = TouchAhead(mapping, self.num_bytes) if late else None
        self.buffer = memoryview(mapping)
        self.checksums = SliceChecksums(num_blocks, layout.num_layers)

    def seal(self) -> None:
        """Fixes the size, and prevents new writable mappings by other processes. Does nothing to a
        kept file, of which peers have a read-only descriptor."""
        if not self._kept:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)

    def reach(self, num_blocks: int) -> None:
        """Announces that the first `num_blocks` blocks are or will soon be in use. Takes their
        memory in another thread, unless the arena already has it."""
        if self._ahead is not None:
            self._ahead.reach(num_blocks * self.block_bytes)

    @property
    def is_late(self) -> bool:
        """Whether memory is taken only when blocks are reached."""
        return self._ahead is not None

    def forget_content(self) -> None:
        """Gives the memory of all blocks back, which then contain zeros. Does nothing for a sealed
        arena, whose memory cannot be returned, or for an arena that allocated its memory at the
        start."""
        if self._ahead is not None and self._mapping is not None:
            with contextlib.suppress(PermissionError):
                self._mapping.madvise(mmap.MADV_REMOVE)

    def slice(self, block_id: int, layer: int) -> memoryview:
        """Returns the slice's bytes, writable. The caller has checked both numbers."""
        start = block_id * self.block_bytes + layer * self.slice_bytes
        return self.buffer[start : start + self.slice_bytes]

    def holds(self, block_id: int) -> bool:
        """Whether the block id is valid."""
        return 0 <= block_id < self.num_blocks

    def close(self) -> None:
        """Frees the memory, at once or when the last tensor or view over it ends."""
        if self.fd < 0:
            return
        self._close_files()
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = self._mapping = None
        # No forced unmap: torch.frombuffer keeps a reference but does not lock the buffer, so a
        # tensor that outlives the arena would read unmapped memory.
        self.buffer = memoryview(b"")

    def _close_files(self) -> None:
        for fd in {self.fd, self.peer_fd}:
            os.close(fd)
        self.fd = self.peer_fd = -1


def available_memory_bytes(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Returns the bytes this process can still allocate, by the limits of the machine and of its
    cgroups (v2)."""
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
    """Returns None where the folder sets no limit. Cached file pages count as free."""
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


def check_memory(needed_bytes: int) -> None:
    """Raises ArenaError if the machine cannot give an arena this much more memory."""
    available = available_memory_bytes()
    if needed_bytes > available:
        raise ArenaError(
            f"the KVCache arena needs {needed_bytes / _GIB:.2f} GiB but only"
            f" {available / _GIB:.2f} GiB of memory are available;"
            " lower pool.dram_tokens_per_instance or start fewer instances"
        )


def _prefault(mapping: mmap.mmap, num_bytes: int) -> None:
    """Touches all pages: a first touch during a transfer is ten times slower than the copy."""
    for start in range(0, num_bytes, _PREFAULT_STEP_BYTES):
        length = min(_PREFAULT_STEP_BYTES, num_bytes - start)
        try:
            mapping.madvise(MADV_POPULATE_WRITE, start, length)
        except OSError:  # kernels before 5.14
            for page in range(start, start + length, mmap.PAGESIZE):
                mapping[page] = mapping[page]


class PeerArena:
    """A peer's arena, mapped read-only. `PeerArenas.adopt` creates objects of this class."""

    def __init__(self, mapping: mmap.mmap, layout: BlockLayout) -> None:
        self._bytes = np.frombuffer(mapping, np.uint8)
        self.address: int = self._bytes.ctypes.data
        """The start address of the mapping, which lasts as long as this object."""
        self._num_layers = layout.num_layers
        self._slice_bytes = layout.slice_bytes
        self.num_blocks = len(self._bytes) // layout.block_bytes

    def offsets(self, offers: Sequence[SliceOffer], slice_bytes: int | None = None) -> list[int]:
        """Returns each slice's offset in the peer's arena. `slice_bytes`: the peer's slice size, if
        it differs from this arena's. Raises ArenaError if a slice does not exist."""
        layers, size = self._num_layers, slice_bytes or self._slice_bytes
        block_bytes = layers * size
        num_blocks = len(self._bytes) // block_bytes
        offsets = []
        for _, layer, block_id, _ in offers:
            if not (0 <= block_id < num_blocks and 0 <= layer < layers):
                raise ArenaError(f"the peer offered block {block_id} layer {layer}, which it lacks")
            offsets.append(block_id * block_bytes + layer * size)
        return offsets

    def copy(self, start: int, arena: Arena, offset: int, num_bytes: int) -> None:
        """Copies from `start` in the peer's arena to `offset` in this one, without the GIL."""
        target = np.frombuffer(arena.buffer[offset : offset + num_bytes], np.uint8)
        np.copyto(target, self._bytes[start : start + num_bytes])


class PeerArenas:
    """The peers' arenas in use, each mapped once for all connections. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users: dict[tuple[int, int], int] = {}
        self._arenas: dict[tuple[int, int], PeerArena] = {}

    def adopt(self, fd: int, layout: BlockLayout) -> tuple[PeerArena, tuple[int, int]]:
        """Maps the arena behind `fd` and closes `fd`. Returns it with the name to `release` it by.
        Raises ArenaError if `fd` is neither a sealed memfd nor a closed file of our own user."""
        try:
            num_bytes, name = _check_safe(fd)
            with self._lock:
                arena = self._arenas.get(name)
                if arena is None:
                    arena = PeerArena(mmap.mmap(fd, num_bytes, prot=mmap.PROT_READ), layout)
                    self._arenas[name] = arena
                self._users[name] = self._users.get(name, 0) + 1
            return arena, name
        except OSError as error:
            raise ArenaError(f"the peer's arena cannot be mapped: {error}") from error
        finally:
            os.close(fd)

    def release(self, name: tuple[int, int]) -> None:
        """Ends one use. The arena is unmapped after its last use, once no copy from it runs."""
        with self._lock:
            self._users[name] -= 1
            if not self._users[name]:
                del self._users[name], self._arenas[name]

    def __len__(self) -> int:
        return len(self._arenas)


def _check_safe(fd: int) -> tuple[int, tuple[int, int]]:
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        raise ArenaError("the peer's arena is not a memory file")
    own = found.st_uid == os.geteuid() and not found.st_mode & 0o077
    if not found.st_size or not (own or _is_sealed(fd)):
        raise ArenaError("the peer's arena is empty or not sealed")
    return found.st_size, (found.st_dev, found.st_ino)


def _is_sealed(fd: int) -> bool:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return bool(seals & fcntl.F_SEAL_SHRINK and seals & fcntl.F_SEAL_GROW)
