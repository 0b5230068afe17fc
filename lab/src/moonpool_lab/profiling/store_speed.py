"""Measures the SSD store against a file that is written and read in order on the same disk.

The raw file and the store take turns of a few hundred MiB, so that a slow phase of the disk affects
both. Both stores move the same bytes between the same memory (the arena) and the same folder, use
O_DIRECT if the disk supports it, and write into reserved space.
"""

from __future__ import annotations

import errno
import os
import queue
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from moonpool.protocol.block_layout import BlockLayout
from moonpool.protocol.transfer_events import LoadEnded, MessengerEvent, StoreEnded
from moonpool.types import BlockId, BlockKey
from moonpool_engine.storage.folder import instance_folder
from moonpool_engine.storage.store import BlockStore, open_store
from moonpool_engine.transfer.arena import Arena

RAW_STEP_BYTES = 4 << 20
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 28, 8, 128
"""The shape of Qwen3-0.6B, whose block of 64 tokens is 7 MiB in bfloat16."""
OPERATION_BLOCKS = 16
TURN_BYTES = 128 << 20
_INSTANCE = "bench"
_RAW_NAME = "raw"


class StoreBenchError(RuntimeError):
    """Says which operation failed; the measurement is then void."""


def bench_store(
    folder: Path,
    gib: float,
    block_tokens: tuple[int, ...],
    repeats: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Returns bytes per second for each block size.

    Raises StoreBenchError, StoreError, OSError.
    """
    runs = []
    folder.mkdir(parents=True, exist_ok=True)
    for tokens in block_tokens:
        with tempfile.TemporaryDirectory(prefix="bench-", dir=folder) as own:
            run = _Run(Path(own), tokens, gib)
            runs.append(run.measure(repeats, say))
    free_bytes = shutil.disk_usage(folder).free
    return {"runs": runs, "folder_free_bytes": free_bytes, "repeats": repeats}


class _Run:
    def __init__(self, folder: Path, block_tokens: int, gib: float) -> None:
        layout = BlockLayout(
            model_fingerprint="bench",
            dtype="bfloat16",
            block_tokens=block_tokens,
            num_layers=NUM_LAYERS,
            num_kv_heads=NUM_KV_HEADS,
            head_dim=HEAD_DIM,
        )
        self._folder = folder
        self._layout = layout
        self._num_blocks = max(OPERATION_BLOCKS, int(gib * (1 << 30)) // layout.block_bytes)
        self._num_bytes = self._num_blocks * layout.block_bytes
        self._arena = Arena(layout, 2 * OPERATION_BLOCKS)
        rng = np.random.default_rng(1)
        for block in range(2 * OPERATION_BLOCKS):
            start = block * layout.block_bytes
            self._arena.buffer[start : start + layout.block_bytes] = rng.bytes(layout.block_bytes)
        self._events: queue.SimpleQueue[MessengerEvent] = queue.SimpleQueue()

    def measure(self, repeats: int, say: Callable[[str], None]) -> dict[str, Any]:
        found: dict[str, list[float]] = {
            name: [] for name in ("raw_write", "write", "raw_read", "read", "adopt")
        }
        direct = True
        for _ in range(repeats):
            store = self._open()
            direct = store.disk.direct
            raw = _RawFile(self._folder / _RAW_NAME, self._arena.buffer, direct)
            try:
                for name, ours, theirs in (
                    ("write", self._store_some, raw.write),
                    ("read", self._load_some, raw.read),
                ):
                    ours_s, raw_s = self._take_turns(store, ours, theirs)
                    found[name].append(self._num_bytes / ours_s)
                    found[f"raw_{name}"].append(self._num_bytes / raw_s)
            finally:
                raw.close()
            store.close()
            found["adopt"].append(self._adopt())
            shutil.rmtree(instance_folder(self._folder, _INSTANCE))
        return self._report(found, direct, say)

    def _take_turns(
        self,
        store: BlockStore,
        ours: Callable[[BlockStore, range], None],
        theirs: Callable[[int, int], None],
    ) -> tuple[float, float]:
        """Returns the total seconds of the store and of the raw file. In every other round, the
        store goes first."""
        spent_s = [0.0, 0.0]
        turn_blocks = max(OPERATION_BLOCKS, TURN_BYTES // self._layout.block_bytes)
        for number, start in enumerate(range(0, self._num_blocks, turn_blocks)):
            slots = range(start, min(start + turn_blocks, self._num_blocks))
            size = self._layout.block_bytes
            turns: list[Callable[[], None]] = [
                partial(ours, store, slots),
                partial(theirs, start * size, len(slots) * size),
            ]
            for which in (0, 1) if number % 2 else (1, 0):
                began_s = time.perf_counter()
                turns[which]()
                spent_s[which] += time.perf_counter() - began_s
        return spent_s[0], spent_s[1]

    def _open(self) -> BlockStore:
        return open_store(self._folder, _INSTANCE, self._arena, self._num_blocks, self._events.put)

    def _store_some(self, store: BlockStore, slots: range) -> None:
        """Stores in operations of 16 blocks, two in flight."""
        for under_way, some in enumerate(_operations(slots)):
            if under_way >= 2:
                self._wait(StoreEnded)
            blocks = self._blocks(some)
            store.store(f"s{some[0]}", _keys(some), blocks, tuple(some))
        self._wait_rest(StoreEnded, slots)

    def _load_some(self, store: BlockStore, slots: range) -> None:
        for under_way, some in enumerate(_operations(slots)):
            if under_way >= 2:
                self._wait(LoadEnded)
            blocks = self._blocks(some)
            store.load(f"l{some[0]}", _keys(some), tuple(some), blocks)
        self._wait_rest(LoadEnded, slots)

    def _blocks(self, some: range) -> tuple[BlockId, ...]:
        """Returns blocks of one half of the arena, then blocks of the other half."""
        half = OPERATION_BLOCKS * (some[0] // OPERATION_BLOCKS % 2)
        return tuple(BlockId(half + i) for i in range(len(some)))

    def _wait_rest(self, kind: type[StoreEnded] | type[LoadEnded], slots: range) -> None:
        for _ in range(min(2, len(_operations(slots)))):
            self._wait(kind)

    def _wait(self, kind: type[StoreEnded] | type[LoadEnded]) -> None:
        event = self._events.get(timeout=60)
        if not isinstance(event, kind) or event.error:
            raise StoreBenchError(f"an operation failed: {getattr(event, 'error', event)}")

    def _adopt(self) -> float:
        """Returns the seconds to reopen the store while its index is not in the page cache."""
        index = instance_folder(self._folder, _INSTANCE) / "index"
        fd = os.open(index, os.O_RDONLY)
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        began_s = time.perf_counter()
        store = self._open()
        seconds = time.perf_counter() - began_s
        if len(store.stored) != self._num_blocks:
            raise StoreBenchError(f"{len(store.stored)} of {self._num_blocks} blocks were adopted")
        store.close()
        return seconds

    def _report(
        self, found: dict[str, list[float]], direct: bool, say: Callable[[str], None]
    ) -> dict[str, Any]:
        rates = {name: max(found[name]) for name in ("raw_write", "write", "raw_read", "read")}
        ratios = {
            name: {
                "best": rates[name] / rates[f"raw_{name}"],
                "median": statistics.median(
                    ours / raw for ours, raw in zip(found[name], found[f"raw_{name}"], strict=True)
                ),
            }
            for name in ("write", "read")
        }
        adopt_s = min(found["adopt"])
        per_10_gb_s = adopt_s * 10e9 / self._num_bytes
        say(
            f"blocks of {self._layout.block_bytes / (1 << 20):.2f} MiB:"
            f" write {rates['write'] / 1e9:.2f} GB/s ({ratios['write']['best']:.2f} of the raw"
            f" file's {rates['raw_write'] / 1e9:.2f}), read {rates['read'] / 1e9:.2f} GB/s"
            f" ({ratios['read']['best']:.2f} of {rates['raw_read'] / 1e9:.2f}), found again in"
            f" {adopt_s:.3f} s ({per_10_gb_s:.3f} s for 10 GB)"
        )
        return {
            "block_bytes": self._layout.block_bytes,
            "blocks": self._num_blocks,
            "bytes": self._num_bytes,
            "direct": direct,
            "best_bytes_per_s": rates,
            "ours_over_raw": ratios,
            "adopt_s": adopt_s,
            "adopt_s_per_10_gb_extrapolated": per_10_gb_s,
            "all": found,
        }


class _RawFile:
    """A file that is written and read in order, 4 MiB at a time, from and into `memory`."""

    def __init__(self, path: Path, memory: memoryview, direct: bool) -> None:
        self._path = path
        self._step_bytes = step = min(RAW_STEP_BYTES, len(memory))
        self._steps = [memory[at : at + step] for at in range(0, len(memory) - step + 1, step)]
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0)
        self._fd = os.open(path, flags, 0o600)

    def write(self, offset: int, num_bytes: int) -> None:
        """Writes bytes. Raises OSError if the disk is full or takes only a part."""
        os.posix_fallocate(self._fd, offset, num_bytes)
        for at, step in self._plan(offset, num_bytes):
            if os.pwritev(self._fd, [step], at) != len(step):
                raise OSError(errno.EIO, "the disk took only a part")

    def read(self, offset: int, num_bytes: int) -> None:
        """Reads bytes. Raises OSError if the disk fails or the file ends too early."""
        for at, step in self._plan(offset, num_bytes):
            if os.preadv(self._fd, [step], at) != len(step):
                raise OSError(errno.EIO, "the disk gave only a part")

    def close(self) -> None:
        os.close(self._fd)
        self._path.unlink()

    def _plan(self, offset: int, num_bytes: int) -> Iterator[tuple[int, memoryview]]:
        end = offset + num_bytes
        for number, at in enumerate(range(offset, end, self._step_bytes)):
            yield at, self._steps[number % len(self._steps)][: end - at]


def _operations(slots: range) -> list[range]:
    return [slots[i : i + OPERATION_BLOCKS] for i in range(0, len(slots), OPERATION_BLOCKS)]


def _keys(slots: range) -> tuple[BlockKey, ...]:
    return tuple(BlockKey(slot.to_bytes(16, "little")) for slot in slots)
