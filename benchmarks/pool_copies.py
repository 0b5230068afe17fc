"""Measures how fast vLLM loads blocks from the pool, compared with the limits of the machine.

    python -m benchmarks.pool_copies [--mib 256] [--json F]
    python -m benchmarks.pool_copies --vllm VENV/bin/python --model FOLDER [--json F]

Loads and stores of the connector are compared with a plain copy of the same number of bytes, in
turns, each on one core. Loads from the SSD, right after stores and after these are written, are
compared with plain O_DIRECT reads of the pool's files; the pool's CPU seconds per GB are reported.

With `--vllm`, it measures the cost of misses instead, with two vLLMs in turns: one uses a pool that
never has a prompt and stores them all, the other has no connector.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from benchmarks.suite.live.idle import cpu_s
from benchmarks.suite.live.vllm_server import CPU_BLOCK_TOKENS
from benchmarks.suite.pool_in_vllm.misses import MissPlan, misses
from benchmarks.suite.pool_in_vllm.pools import MoonpoolPool, PoolPlace
from moonpool.cli.output import origin, write_json
from moonpool.host_pool.messages import (
    PROTOCOL,
    AttachRank,
    Commit,
    Find,
    Found,
    Release,
    Reserve,
    Reserved,
)
from moonpool.protocol.block_layout import BlockLayout
from moonpool_engine.vllm.block_copier import HostCopier
from moonpool_engine.vllm.block_kinds import kinds_of
from moonpool_engine.vllm.cache_layout import CacheLayout
from moonpool_engine.vllm.pool_link import PoolLink
from moonpool_engine.vllm.slice_mover import NativeSliceMover, open_mover
from moonpool_lab.demo.local_server import ServerError

BLOCK_TOKENS, NUM_LAYERS, WIDTH = 16, 32, 1024  # 8 KV heads of 128 values, as in an 8B model
READ_BYTES = 4 << 20
READERS = 4
SETTLE_S = 3.0
"""Time until all stored blocks have been written."""
ANSWER_S = 120.0
GROUP = b"pool_copies".ljust(32, b".")


class Cache:
    """KVCache tensors as vLLM's, and memory as the pool's."""

    def __init__(self, num_bytes: int) -> None:
        names = [f"layer.{number}" for number in range(NUM_LAYERS)]
        shape = (-1, 2, BLOCK_TOKENS, WIDTH)
        block_bytes = 2 * BLOCK_TOKENS * WIDTH * 2
        self.num_blocks = max(8, num_bytes // (block_bytes * NUM_LAYERS))
        values = self.num_blocks * block_bytes // 2
        self.tensors = {
            name: torch.ones(values, dtype=torch.bfloat16).view(shape) for name in names
        }
        kind = type("FullAttentionSpec", (), {"block_size": BLOCK_TOKENS})()
        kind.page_size_bytes = block_bytes
        groups = [SimpleNamespace(layer_names=names, kv_cache_spec=kind)]
        config = SimpleNamespace(
            num_blocks=self.num_blocks, kv_cache_groups=groups, kv_cache_tensors=[]
        )
        self.layout = CacheLayout.of(self.tensors, config)
        self.block_bytes = self.layout.num_slices * self.layout.slice_bytes
        self.names = names


def copies(num_bytes: int, rounds: int) -> dict[str, float]:
    """Returns the bytes per second of loads and stores, as medians, and their shares of a plain
    copy's. `has_kernels` 0: the kernels are not built, and a third of that speed is usual."""
    cache, mover = Cache(num_bytes), open_mover()
    copier = HostCopier(cache.layout, kinds_of(cache.layout)[0], mover)
    memory = np.ones(cache.num_blocks * cache.block_bytes + 64, np.uint8)
    start = memory.ctypes.data + -memory.ctypes.data % 64
    ids = np.random.default_rng(0).permutation(cache.num_blocks).astype(np.int64)
    places = start + np.arange(cache.num_blocks, dtype=np.int64) * cache.block_bytes
    source, target = np.ones((2, cache.num_blocks * cache.block_bytes), np.uint8)

    def load() -> None:
        for name in cache.names:
            copier.load(name, ids, places)

    acts: dict[str, Callable[[], object]] = {
        "plain_copy": lambda: np.copyto(target, source),
        "load": load,
        "store": lambda: copier.store([ids], places),
    }
    times: dict[str, list[float]] = {name: [] for name in acts}
    for number in range(rounds + 1):
        for name, act in acts.items():
            began_s = time.perf_counter()
            act()
            if number:  # the first round touches the pages
                times[name].append(time.perf_counter() - began_s)
    speeds = {name: len(source) / statistics.median(taken) for name, taken in times.items()}
    found = {f"{name}_bytes_per_s": speed for name, speed in speeds.items()}
    shares = {f"{n}_of_plain_copy": speeds[n] / speeds["plain_copy"] for n in ("load", "store")}
    found |= {"bytes": len(source), "slice_bytes": cache.layout.slice_bytes}
    return found | shares | {"has_kernels": float(isinstance(mover, NativeSliceMover))}


class PoolClient:
    """Stores blocks in a pool and asks for them, as a rank of vLLM and its scheduler do."""

    def __init__(self, path: Path, cache: Cache) -> None:
        layout = BlockLayout(
            model_fingerprint=GROUP.hex(),
            dtype="bfloat16",
            block_tokens=1,
            num_layers=cache.layout.num_slices,
            num_kv_heads=1,
            head_dim=cache.layout.slice_bytes // 4,
            inner="vllm",
        )
        attach = AttachRank(
            protocol=PROTOCOL,
            group=GROUP,
            model="pool_copies",
            rank=0,
            num_ranks=1,
            block_tokens=BLOCK_TOKENS,
            layout=layout,
        )
        self._cache = cache
        self._copier = HostCopier(cache.layout, kinds_of(cache.layout)[0], open_mover())
        self._answers: list[Any] = []
        self._has_news = threading.Condition()
        self._link = PoolLink(path, attach, self._take, lambda: None)
        self._link.start()
        until_s = time.monotonic() + ANSWER_S
        while self._link.memory is None:
            if time.monotonic() > until_s:
                raise ServerError("the pool takes no rank")
            time.sleep(0.01)

    def store(self, number: int, keys: Sequence[bytes]) -> None:
        """Stores at most as many keys as vLLM has blocks."""
        self._link.send(Reserve(number=number, keys=tuple(keys)))
        reserved = self._wait(Reserved)
        places = np.frombuffer(reserved.block_ids, "<i8")
        chosen = np.flatnonzero(places >= 0)
        memory = self._link.memory
        assert memory is not None
        sums = self._copier.store(
            [chosen.astype(np.int64)], memory.address + places[chosen] * self._cache.block_bytes
        )
        self._link.send(Commit(number=number, checksums=sums.astype("<u8").tobytes()))

    def find(self, owner: str, keys: Sequence[bytes]) -> tuple[Found, float]:
        """Returns how much of the prompt the pool then has in memory, and the seconds until its
        answer."""
        began_s = time.perf_counter()
        self._link.send(Find(owner=owner, group=GROUP, keys=tuple(keys)))
        found = self._wait(Found)
        seconds = time.perf_counter() - began_s
        self._link.send(Release(owner=owner, group=GROUP))
        return found, seconds

    def close(self) -> None:
        self._link.close()

    def _take(self, message: Any) -> None:
        with self._has_news:
            self._answers.append(message)
            self._has_news.notify_all()

    def _wait(self, kind: type[Any]) -> Any:
        def first() -> Any:
            return next((one for one in self._answers if isinstance(one, kind)), None)

        with self._has_news:
            if not self._has_news.wait_for(lambda: first() is not None, ANSWER_S):
                raise ServerError(f"the pool did not answer with {kind.__name__}")
            found = first()
            self._answers.clear()
        return found


@contextmanager
def running_pool(python: str, folder: Path, dram_bytes: int) -> Iterator[MoonpoolPool]:
    pool = MoonpoolPool(PoolPlace(python, folder, dram_bytes, CPU_BLOCK_TOKENS))
    pool.start()
    try:
        yield pool
    finally:
        pool.stop()


def ssd_reads(num_bytes: int, folder: Path) -> dict[str, float]:
    """Stores four times the pool's memory, then requests the first blocks and, after a pause,
    others. Raises ServerError."""
    cache = Cache(num_bytes)
    blocks = cache.num_blocks
    keys = [number.to_bytes(16, "big") for number in range(1, 4 * blocks + 1)]
    with running_pool(sys.executable, folder, blocks * cache.block_bytes) as pool:
        client = PoolClient(folder / "pool.sock", cache)
        size = max(1, blocks // 8)
        for number, start in enumerate(range(0, len(keys), size)):
            client.store(number, keys[start : start + size])
            client.find(f"stored-{number}", keys[start : start + size])  # the store was handled
            time.sleep(0.05)  # blocks that are stored faster than the SSD writes would not be kept
        early = _read(client, pool, keys[: blocks // 2], size)
        time.sleep(SETTLE_S)
        late = _read(client, pool, keys[blocks // 2 : 2 * blocks], size)
        client.close()
        pool.kill()
        files = [path for path in (folder / "files").rglob("*") if path.is_file()]
        plain = plain_read(max(files, key=lambda path: path.stat().st_size), num_bytes)
    found: dict[str, float] = {"plain_read_bytes_per_s": plain}
    for name, (loaded, seconds, pool_cpu_s) in {"": early, "settled_": late}.items():
        if not loaded:
            raise ServerError("nothing came from the SSD: give --mib more")
        speed = loaded * cache.block_bytes / seconds
        found |= {
            f"{name}ssd_hits_bytes_per_s": speed,
            f"{name}ssd_hits_of_plain_read": speed / plain,
            f"{name}pool_cpu_s_per_gb": pool_cpu_s / (loaded * cache.block_bytes) * 1e9,
            f"{name}bytes": loaded * cache.block_bytes,
        }
    return found


def _read(
    client: PoolClient, pool: MoonpoolPool, keys: Sequence[bytes], size: int
) -> tuple[int, float, float]:
    """Asks for blocks, `size` at a time. Returns how many blocks came from the SSD, the seconds of
    the searches, and the CPU seconds of the pool in all of them."""
    began_s = sum(map(cpu_s, pool.pids))
    taken = [client.find(f"read-{at}", keys[at : at + size]) for at in range(0, len(keys), size)]
    loaded = sum(found.num_loaded for found, _ in taken)
    seconds = sum(seconds for found, seconds in taken if found.num_loaded)
    return loaded, seconds, sum(map(cpu_s, pool.pids)) - began_s


def plain_read(path: Path, num_bytes: int) -> float:
    """Bytes a second of `READERS` threads that read a file past the page cache."""
    size = min(path.stat().st_size, num_bytes) // READ_BYTES * READ_BYTES
    if not size:
        raise ServerError(f"the SSD tier has too little to read: give --mib more ({path.name})")
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(first: int) -> None:
        buffer = mmap.mmap(-1, READ_BYTES)
        for at in range(first * READ_BYTES, size, READERS * READ_BYTES):
            os.preadv(fd, [buffer], at)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(READERS)]
    began_s = time.perf_counter()
    try:
        for thread in threads:
            thread.start()
    finally:
        for thread in threads:
            thread.join()
        os.close(fd)
    return size / (time.perf_counter() - began_s)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--mib", type=int, default=256, help="Of blocks.")
    add("--rounds", type=int, default=7)
    add("--folder", default="", help="On the SSD; a temporary folder unless given.")
    add("--vllm", default="", help="Python of a vLLM installation.")
    add("--model", default="", help="Folder of a model for it.")
    add("--prompts", type=int, default=24, help="Of each round, for the cost of misses.")
    add("--prompt-tokens", type=int, default=512)
    add("--json", default="")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    root = Path(tempfile.mkdtemp(dir=args.folder or None))
    found: dict[str, Any] = {}
    try:
        if args.vllm:
            plan = MissPlan(args.vllm, args.model, args.rounds, args.prompts, args.prompt_tokens)
            with running_pool(args.vllm, root, args.mib << 20) as pool:
                found["misses"] = misses(plan, pool)
        else:
            found["dram"] = copies(args.mib << 20, args.rounds)
            found["ssd"] = ssd_reads(args.mib << 20, root)
    except ServerError as error:
        sys.exit(f"error: {error}")
    finally:
        shutil.rmtree(root)
    found["origin"] = origin() | {"command": "python -m benchmarks.pool_copies"}
    sys.stdout.write(json.dumps(found, indent=1) + "\n")
    write_json(args.json or None, found)


if __name__ == "__main__":
    main()
