"""A head, vLLMs of several models and one pool for them. The trial kills the processes one by one,
and changes stored bytes."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import cycle
from pathlib import Path

import httpx

from benchmarks.suite.live.kills.processes import victims
from benchmarks.suite.pool_in_vllm.fleet import GroupedVllm, VllmShape, pooled_vllm
from benchmarks.suite.pool_in_vllm.play import CacheCounts, cache_counts
from benchmarks.suite.pool_in_vllm.pools import MoonpoolPool, PoolPlace
from moonpool.types import Struct
from moonpool_lab.demo.local_server import LocalServer, ServerError

DAMAGE_STEP_BYTES = 16 << 10
MAX_FILLED_BYTES = 4 << 30
EASY = ("--admission", "none", "--slo-ttft", "600")


class TrialShape(Struct, frozen=True):
    """What runs. `kv_tokens`: the tokens in the memory of each vLLM."""

    python: str
    models: tuple[str, ...]
    kv_tokens: int
    context_tokens: int
    chunk_tokens: int
    dram_bytes: int
    ssd: str
    disk_folder: str
    """A folder of the SSD tier; in a temporary folder unless given."""
    modules: tuple[str, ...] = ()
    """Further folders of Python modules for the vLLMs: a test plants faults by them."""


class TrialPool(MoonpoolPool):
    """With room for several models, and an SSD tier that may be on a small file system."""

    def __init__(self, place: PoolPlace, shape: TrialShape) -> None:
        super().__init__(place)
        self._shape = shape
        self.disk = Path(shape.disk_folder or place.folder / "files") / f"trial-{os.getpid()}"

    def environment(self) -> dict[str, str]:
        told = super().environment()
        return told | {"PYTHONPATH": ":".join([*self._shape.modules, told["PYTHONPATH"]])}

    def commands(self) -> Sequence[Sequence[str]]:
        ((*words,),) = super().commands()
        words[words.index("--folder") + 1] = str(self.disk)
        words[words.index("--ssd") + 1] = self._shape.ssd
        return ((*words, "--models", str(len(self._shape.models))),)

    def damage(self, rng: random.Random, share: float) -> int:
        """Changes a byte in this share of all block places, in memory and on the SSD, while the
        pool works. Returns how many."""
        arenas = self._memory.glob("*/arena") if self._memory.exists() else ()
        files = [p for p in self.disk.rglob("*") if p.is_file()] if self.disk.exists() else ()
        return sum(damage_file(path, rng, share) for path in (*arenas, *files))

    def fill_disk(self) -> None:
        """Another program's file takes all that is free on the disk of the SSD tier. Raises
        ServerError if that disk is not a small file system."""
        place = os.statvfs(self._shape.disk_folder)
        if place.f_frsize * place.f_blocks > MAX_FILLED_BYTES:
            raise ServerError(f"{self._shape.disk_folder} is to be filled: mount a small tmpfs")
        with self._filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(DAMAGE_STEP_BYTES))

    def free_disk(self) -> None:
        self._filler.unlink(missing_ok=True)

    def stop(self) -> None:
        super().stop()
        self.free_disk()

    @property
    def _filler(self) -> Path:
        return self.disk.with_name(f"{self.disk.name}-filler")


def damage_file(path: Path, rng: random.Random, share: float) -> int:
    changed = 0
    with suppress(OSError), path.open("r+b", buffering=0) as file:
        for start in range(0, path.stat().st_size, DAMAGE_STEP_BYTES):
            if rng.random() >= share:
                continue
            at = start + rng.randrange(DAMAGE_STEP_BYTES)
            found = os.pread(file.fileno(), 1, at)
            if found:
                os.pwrite(file.fileno(), bytes([found[0] ^ 0x55]), at)
                changed += 1
    return changed


class TrialCluster:
    """Starts with a `with` block. Raises ServerError, httpx.HTTPError."""

    def __init__(self, shape: TrialShape, pool: TrialPool | None) -> None:
        """Without a pool, each vLLM serves without any cache and without a head."""
        self._shape, self.pool = shape, pool
        cores = sorted(os.sched_getaffinity(0))
        sizes = shape.kv_tokens, shape.context_tokens, shape.chunk_tokens, pool is not None
        self.vllms = {
            model: pooled_vllm(shape.python, VllmShape(model, *sizes), core, pool)
            for model, core in zip(shape.models, cycle(cores), strict=False)
        }
        self.front: LocalServer | None = None
        self._hits = Counter[str]()
        self._stack = ExitStack()

    def __enter__(self) -> TrialCluster:
        with ExitStack() as stack:
            if self.pool is not None:
                stack.callback(self.pool.stop)
                self.pool.start()
            for vllm in self.vllms.values():
                stack.callback(vllm.kill)
            with ThreadPoolExecutor(len(self.vllms)) as threads:
                list(threads.map(GroupedVllm.__enter__, self.vllms.values()))
            if self.pool is not None:
                words = [word for v in self.vllms.values() for word in ("--vllm", v.url)]
                here = {"MOONPOOL_POOL": str(self.pool.socket_path)}
                self.front = LocalServer((*words, *EASY), environment=here)
                stack.enter_context(self.front)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def urls(self) -> Mapping[str, str]:
        """Where each model is asked: at the head, if there is one."""
        return {
            model: vllm.url if self.front is None else self.front.url
            for model, vllm in self.vllms.items()
        }

    def check_that_pool_is_used(self) -> None:
        """A trial of a vLLM that has refused the pool would say nothing of it. Raises
        ServerError."""
        for model, vllm in self.vllms.items():
            for line in vllm.said("serves without the KVCache pool"):
                raise ServerError(f"the vLLM of {model} says: {line[line.index('vLLM serves') :]}")

    def kill_pool(self, rng: random.Random, damage_share: float) -> int:
        """Kills the pool (`kill -9`), damages the files that it left, and starts it again. Returns
        the number of damaged places."""
        assert self.pool is not None
        self.pool.kill()
        changed = self.pool.damage(rng, damage_share)
        self.pool.start()
        return changed

    def kill_vllm(self, model: str) -> None:
        """Kills all processes of a vLLM (`kill -9`), and starts it again on the same port."""
        self._keep_hits(model)
        vllm = self.vllms[model]
        vllm.kill()
        vllm.__enter__()

    def kill_head(self) -> int:
        """`kill -9` of the head; its supervisor starts another. Returns how many heads were
        killed."""
        assert self.front is not None
        pids = victims(self.front.pid).get("head", [])
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(pids)

    def hits(self) -> CacheCounts:
        """Prompt tokens asked, found in vLLM and in the pool; also of vLLMs that were killed."""
        for model in self.vllms:
            self._keep_hits(model)
        return CacheCounts(self._hits["asked"], self._hits["local"], self._hits["external"])

    def _keep_hits(self, model: str) -> None:
        """Keeps the counts of a vLLM that will be killed, because its counters begin again at 0."""
        with suppress(httpx.HTTPError):
            counts = cache_counts([self.vllms[model].url])
            for name in ("asked", "local", "external"):
                value, before = getattr(counts, name), self._hits[f"{model} {name}"]
                self._hits[name] += int(value - before if value >= before else value)
                self._hits[f"{model} {name}"] = int(value)
