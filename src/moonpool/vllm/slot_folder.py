"""The folder of a server's saved slots (`--slot-save-path`): checked, bounded, and read again after
a restart.

Each saved slot is a file that the server writes, and a note beside it that moonpool writes: the
tokens, and the digest of the file. The name is a hash of model, tenant and tokens, so a note whose
content does not match its name is ignored. A file that its note does not fit is a miss, and is
deleted. Servers of one machine that serve the same model may share a folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import msgspec

from moonpool.protocol.block_layout import KEY_BYTES, block_keys
from moonpool.types import MALFORMED, BlockKey
from moonpool.vllm.slot_table import Held, name_of

DATA, NOTE = ".slot", ".note"
PREFIX = "moonpool-"
VERSION = 1
MAX_NOTE_BYTES = 8 << 20
MAX_FILES = 4096
STRAY_S = 600.0
"""A file without a note that is older than this is not being written any more, and is deleted."""
_PIECE_BYTES = 4 << 20
_HEADER_BYTES = 4096
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class _Note(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    version: int
    identity: bytes
    root: bytes
    block_tokens: int
    token_ids: bytes  # token ids as uint32, little endian
    num_bytes: int
    digest: bytes


_NOTE = msgspec.msgpack.Decoder(_Note)
_encode = msgspec.msgpack.encode


def write_new(path: Path, content: bytes) -> None:
    """Writes a file that only its owner reads. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(path, "wb", opener=lambda name, _: os.open(name, flags, 0o600)) as out:
        out.write(content)


def _open(path: str, flags: int) -> int:
    return os.open(path, _READ)


class SlotFolderError(Exception):
    """The folder cannot be used; one line says why."""


class SlotFolder:
    """All methods block. `max_bytes` bounds the files of all processes that share the folder; 0
    means half of the disk space that is free, or taken by such files, when the folder is opened."""

    def __init__(self, path: str, block_tokens: int, max_bytes: int = 0) -> None:
        """Raises SlotFolderError."""
        self.path = Path(path)
        self._block_tokens = block_tokens
        try:
            if not self.path.is_dir():
                raise SlotFolderError(f"{path} is no folder on this machine")
            disk = os.statvfs(self.path)
        except OSError as error:
            raise SlotFolderError(f"{path} cannot be used: {error.strerror}") from None
        self._changed = 0
        free_bytes = disk.f_bavail * disk.f_frsize
        own_bytes = sum(size for _, _, size in self._all())
        self.max_bytes = max_bytes or (free_bytes + own_bytes) // 2

    def has_changed(self) -> bool:
        """Whether files came or went since the last call."""
        try:
            changed = self.path.stat().st_mtime_ns
        except OSError:
            return False
        before, self._changed = self._changed, changed
        return before != changed

    def file_name(self, name: str) -> str:
        """Returns the file name under which the server saves the slot of this name."""
        return f"{PREFIX}{name}{DATA}"

    def _data(self, name: str) -> Path:
        return self.path / self.file_name(name)

    def _note(self, name: str) -> Path:
        return self.path / f"{PREFIX}{name}{NOTE}"

    def scan(self, identities: frozenset[bytes]) -> list[Held]:
        """The files of these models, the least recently used first. Deletes files that have had no
        valid note for STRAY_S."""
        found = []
        now_s = time.time()
        for used_s, name, _ in sorted(self._all()):
            note = self._read_note(name)
            if note is None:
                if now_s - used_s > STRAY_S:
                    self.remove(name)
                continue
            if note.identity in identities and note.block_tokens == self._block_tokens:
                found.append(self._held(name, note))
        return found[-MAX_FILES:]

    def admit(self, held: Held, num_bytes: int) -> bool:
        """Takes a slot of `num_bytes` that a server has saved. Returns whether the file can be
        used; if not, it is deleted."""
        digest = self._digest(held.name, num_bytes)
        if digest is None or not self._names_tokens(held):
            self.remove(held.name)
            return False
        made = array("I", held.token_ids).tobytes()
        note = _Note(VERSION, held.identity, held.root, self._block_tokens, made, num_bytes, digest)
        new = self.path / f"{PREFIX}{held.name}.{os.getpid()}{NOTE}.new"
        try:
            write_new(new, _encode(note))
            new.rename(self._note(held.name))
        except OSError:
            with contextlib.suppress(OSError):
                new.unlink()
            self.remove(held.name)
            return False
        return True

    def is_intact(self, held: Held) -> bool:
        """Whether the file is still the one that was saved. Any other file is deleted."""
        note = self._read_note(held.name)
        if note is not None and self._digest(held.name, note.num_bytes) == note.digest:
            with contextlib.suppress(OSError):
                os.utime(self._note(held.name))
            return True
        self.remove(held.name)
        return False

    def remove(self, name: str) -> None:
        for path in (self._note(name), self._data(name)):
            with contextlib.suppress(OSError):
                path.unlink()

    def bound(self) -> tuple[str, ...]:
        """Deletes the least recently used files until the others fit `max_bytes` and MAX_FILES.
        Returns the names of the deleted files."""
        files = sorted(self._all())
        total = sum(size for _, _, size in files)
        gone: list[str] = []
        for _, name, size in files:
            if total <= self.max_bytes and len(files) - len(gone) <= MAX_FILES:
                break
            self.remove(name)
            total -= size
            gone.append(name)
        return tuple(gone)

    def _all(self) -> Iterator[tuple[float, str, int]]:
        """Yields when each file was last used, its name, and its size with its note's."""
        found: dict[str, tuple[float, int]] = {}
        try:
            with os.scandir(self.path) as entries:
                for entry in entries:
                    name, dot, kind = entry.name.removeprefix(PREFIX).partition(".")
                    if entry.name.startswith(PREFIX) and dot + kind in (DATA, NOTE):
                        with contextlib.suppress(OSError):
                            state = entry.stat(follow_symlinks=False)
                            used_s, size = found.get(name, (0.0, 0))
                            found[name] = max(used_s, state.st_mtime), size + state.st_size
        except OSError:
            return
        for name, (used_s, size) in found.items():
            yield used_s, name, size

    def _held(self, name: str, note: _Note) -> Held:
        token_ids = array("I", note.token_ids)
        root = BlockKey(note.root)
        keys = tuple(block_keys(token_ids, self._block_tokens, root))
        return Held(root, keys, len(token_ids), name)

    def _read_note(self, name: str) -> _Note | None:
        """Returns None if there is none, or if it does not belong to the name."""
        try:
            with open(self._note(name), "rb", opener=_open) as file:
                raw = file.read(MAX_NOTE_BYTES + 1)
            note = _NOTE.decode(raw) if len(raw) <= MAX_NOTE_BYTES else None
        except (OSError, *MALFORMED):
            return None
        if note is None or note.version != VERSION or len(note.token_ids) % 4:
            return None
        if len(note.root) != KEY_BYTES:
            return None
        tokens = array("I", note.token_ids)
        is_own = name_of(note.identity, BlockKey(note.root), tokens) == name
        return note if is_own else None

    def _names_tokens(self, held: Held) -> bool:
        """Whether the file begins with the slot's tokens. Another client may have used the slot."""
        tokens = array("I", held.token_ids).tobytes()
        try:
            with open(self._data(held.name), "rb", opener=_open) as file:
                return tokens in file.read(len(tokens) + _HEADER_BYTES)
        except OSError:
            return False

    def _digest(self, name: str, num_bytes: int) -> bytes | None:
        """Returns the digest of a regular file of that size, or None if it is another file."""
        made = hashlib.blake2b(digest_size=32)
        try:
            with open(self._data(name), "rb", buffering=0, opener=_open) as file:
                state = os.fstat(file.fileno())
                if not stat.S_ISREG(state.st_mode) or state.st_size != num_bytes:
                    return None
                while piece := file.read(_PIECE_BYTES):
                    made.update(piece)
        except OSError:
            return None
        return made.digest()
