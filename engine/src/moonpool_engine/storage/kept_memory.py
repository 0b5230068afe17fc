"""The memory of an instance's blocks that outlives its process: two files in memory.

    arena     the blocks, as `transfer.arena` lays them out
    ledger    which block holds which key, and the checksums of its slices (`storage.block_ledger`)

The files are memfds of the process that starts the workers, or lie in a tmpfs or hugetlbfs folder
that the user names. A worker opens memfds by their paths in /proc, and they end with that process.
Files in a folder end with the machine. KVCache contains what users wrote, so only the owner can
access the files (0600).

Only one instance uses the files at a time. The lock belongs to the open arena file, and the
processes of an instance (ranks, stages, the NIXL process) share that open file: so the lock ends
with the last process that could still write a block, not with the first one that is killed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import struct
import time
from pathlib import Path

import xxhash

from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.versions import BLOCK_FORMATS
from moonpool_engine.storage.folder import StoreError, instance_folder, make_folder
from moonpool_engine.transfer.arena import ArenaError, check_memory

HEAD_BYTES = 4096
OFF = "off"
"""The value of `pool.keep_memory` that keeps nothing."""
_MAGIC = b"moonkept"
_HEAD = struct.Struct("<8sIIQQ32s")
_CHECKSUM = struct.Struct("<Q")
_LOCK_S = 5.0
"""How long the processes of a killed instance may still hold its lock."""
_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
_log = logging.getLogger("moonpool.worker")


class KeptMemory:
    """The two files of one instance, open and locked. Raises StoreError if another instance has
    them, or if they cannot be opened. `has_names`: whether the files are in a folder."""

    def __init__(self, arena_path: str, ledger_path: str, has_names: bool = False) -> None:
        self.path = arena_path
        self._has_names = has_names
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._fds: list[int] = []
        try:
            for path in (arena_path, ledger_path):
                self._fds.append(os.open(path, flags, 0o600))
                os.fchmod(self._fds[-1], 0o600)
            self._lock()
        except OSError as error:
            self.close()
            text = f"{arena_path} cannot be opened: {error.strerror or error}"
            raise StoreError(text) from None
        except StoreError:
            self.close()
            raise

    def num_blocks(self, layout: BlockLayout) -> int | None:
        """The number of blocks of the arena, or None if the files hold none of this layout."""
        return _decode_head(self._head(), layout)

    def prepare(
        self, layout: BlockLayout, num_blocks: int, late: bool = False
    ) -> tuple[int, mmap.mmap]:
        """Sizes both files for the arena. Returns the arena's descriptor and the ledger, mapped.
        Blocks of another layout are given up. `late`: whether to check that the arena's memory is
        available without taking it, which is only safe for memfds. Raises ArenaError if there is
        too little memory."""
        head = self._head()
        if any(head) and _decode_head(head, layout) is None:
            _log.warning(
                "the memory kept at %s is damaged, or of another model or layout; starting cold",
                self.path,
            )
            os.ftruncate(self._fds[1], 0)  # empties the ledger: its zeros name no block
        sizes = (num_blocks * layout.block_bytes, HEAD_BYTES + num_blocks * record_bytes(layout))
        self._renew_larger(sizes[0])
        arena_fd, ledger_fd = self._fds
        self._resize(arena_fd, sizes[0], take=not late)
        self._resize(ledger_fd, sizes[1], take=True)
        ledger = mmap.mmap(ledger_fd, sizes[1])
        ledger[: _HEAD.size + _CHECKSUM.size] = _encode_head(layout, num_blocks)
        os.close(ledger_fd)
        self._fds.clear()  # the arena closes its own descriptor
        return arena_fd, ledger

    def close(self) -> None:
        """Closes the files, unless `prepare` has passed them on."""
        for fd in self._fds:
            os.close(fd)
        self._fds.clear()

    def _head(self) -> bytes:
        fd = self._fds[1]
        if os.fstat(fd).st_size < HEAD_BYTES:
            return b""
        with mmap.mmap(fd, HEAD_BYTES, prot=mmap.PROT_READ) as head:
            return head[: _HEAD.size + _CHECKSUM.size]

    def _lock(self) -> None:
        end_s = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(self._fds[0], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno != errno.EWOULDBLOCK:
                    raise
            else:
                return
            if time.monotonic() >= end_s:
                raise StoreError(
                    f"{self.path} is in use by another process: two instances cannot share it"
                )
            time.sleep(0.02)

    def _renew_larger(self, num_bytes: int) -> None:
        """Makes a new file where the arena's is larger. Other processes may have the file mapped,
        as vLLMs do: if it shrank, a byte that they read after its end would kill them. The old file
        gives its memory back, and these processes read zeros."""
        old_fd = self._fds[0]
        old_bytes = os.fstat(old_fd).st_size
        if not self._has_names or old_bytes <= _whole_pages(old_fd, num_bytes):
            return
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            with mmap.mmap(old_fd, old_bytes) as old:
                old.madvise(mmap.MADV_REMOVE)
            os.unlink(self.path)
            self._fds[0] = os.open(self.path, flags, 0o600)
            os.close(old_fd)
            self._lock()
        except (OSError, StoreError) as error:
            raise ArenaError(f"{self.path} cannot be made anew: {error}") from None

    def _resize(self, fd: int, num_bytes: int, take: bool) -> None:
        num_bytes = _whole_pages(fd, num_bytes)
        found = os.fstat(fd)
        present_bytes = found.st_blocks * 512
        try:
            check_memory(max(num_bytes - present_bytes, 0))
            os.ftruncate(fd, num_bytes)
            if take:  # writing to a tmpfs that is too small would raise SIGBUS
                os.posix_fallocate(fd, 0, num_bytes)
        except (OSError, ArenaError) as error:
            if found.st_size < num_bytes:
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, found.st_size)
            if isinstance(error, ArenaError):
                raise
            gib = num_bytes / (1 << 30)
            raise ArenaError(
                f"{self.path} has no room for {gib:.2f} GiB of KVCache ({error.strerror}): lower"
                " pool.dram_tokens_per_instance, or name a larger folder as pool.keep_memory"
            ) from None


def open_in_folder(root: Path, instance_id: str) -> KeptMemory:
    """Opens the instance's files below `root`. Raises StoreError."""
    for path in (root, instance_folder(root, instance_id)):
        make_folder(path, "pool.keep_memory")
    if _file_system(root) not in _IN_MEMORY:
        raise StoreError(
            f"{root} is not in memory: name a folder of a tmpfs as pool.keep_memory, such as"
            " /dev/shm/moonpool"
        )
    folder = instance_folder(root, instance_id)
    return KeptMemory(str(folder / "arena"), str(folder / "ledger"), has_names=True)


def _whole_pages(fd: int, num_bytes: int) -> int:
    page_bytes = os.fstatvfs(fd).f_bsize  # a huge page, if the file system is hugetlbfs
    return -(-num_bytes // page_bytes) * page_bytes


def record_bytes(layout: BlockLayout) -> int:
    """Bytes of one block's record in the ledger: sequence, key, checksums of the slices, and the
    checksum of the record."""
    return 8 * (1 + 2 + layout.num_layers + 1)


def _encode_head(layout: BlockLayout, num_blocks: int) -> bytes:
    sizes = (layout.num_layers, layout.slice_bytes, num_blocks)
    body = _HEAD.pack(_MAGIC, BLOCK_FORMATS.newest, *sizes, layout.fingerprint)
    return body + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(body))


def _decode_head(data: bytes, layout: BlockLayout) -> int | None:
    if len(data) < _HEAD.size + _CHECKSUM.size:
        return None
    num_blocks: int = _HEAD.unpack_from(data)[4]
    return num_blocks if data == _encode_head(layout, num_blocks) else None


def _file_system(path: Path) -> str:
    """Returns the type of the file system of `path`, or "" if it is unknown."""
    device = os.stat(path).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        own, _, mounted = line.partition(" - ")
        if own.split()[2] == wanted:
            return mounted.split()[0]
    return ""
