"""Runs the pool of a host as a process of its own, and does what vLLM does around its connector."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from moonpool.host_pool.messages import (
    PROTOCOL,
    AttachRank,
)
from moonpool.protocol.block_layout import BlockLayout, block_keys
from moonpool_engine.vllm.adapters import Adapters
from moonpool_engine.vllm.block_copier import BlockCopier, DeviceCopier, HostCopier
from moonpool_engine.vllm.block_kinds import BlockKind, kinds_of, windows_of
from moonpool_engine.vllm.cache_layout import CacheLayout
from moonpool_engine.vllm.prompt_keys import root_of
from moonpool_engine.vllm.scheduler_side import SchedulerSide
from moonpool_engine.vllm.slice_mover import open_mover
from moonpool_engine.vllm.space_client import SpaceClient
from moonpool_engine.vllm.transfers import RankReady, StepTransfers
from moonpool_engine.vllm.worker_side import WorkerSide
from tests.forked.commands import ForkedCommand
from tests.live.waiting import wait_until

BLOCK_TOKENS, NUM_BLOCKS, NUM_LAYERS = 16, 40, 3
WINDOW_TOKENS, WINDOW_BLOCKS = 33, 2
SHAPE = (NUM_BLOCKS, 2, BLOCK_TOKENS, 128)
GROUP = bytes(range(32))


class FullAttentionSpec:
    """Has the fields of vLLM's config class that the layout needs."""

    block_size = BLOCK_TOKENS
    page_size_bytes = 2 * BLOCK_TOKENS * 128 * 2


class SlidingWindowSpec:
    block_size = BLOCK_TOKENS
    page_size_bytes = 2 * BLOCK_TOKENS * 128 * 2
    sliding_window = WINDOW_TOKENS


class BlockUsers:
    """Stands for vLLM's block pool as far as blocks are held: it counts the users of each block."""

    def __init__(self) -> None:
        self.blocks = list(range(NUM_BLOCKS))
        self.users = [0] * NUM_BLOCKS

    def touch(self, blocks: list[int]) -> None:
        for block in blocks:
            self.users[block] += 1

    def free_blocks(self, blocks: list[int]) -> None:
        for block in blocks:
            self.users[block] -= 1
            assert self.users[block] >= 0


class Pool:
    """Runs `moonpool pool serve` with folders of its own."""

    def __init__(self, *flags: str, secret: str = "") -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="moonpool-pool-"))
        self.memory = Path(tempfile.mkdtemp(dir="/dev/shm"))
        self.memory.chmod(0o700)
        self.socket = self.folder / "pool.sock"
        self._flags = flags
        self._environment = dict(os.environ)
        if secret:
            self._environment["MOONPOOL_CLUSTER_SECRET"] = secret
        self.process = self.start()

    def start(self) -> ForkedCommand:
        place = ["--socket", str(self.socket), "--memory-folder", str(self.memory)]
        command = ["pool", "serve", *place, *self._flags]
        with (self.folder / "log").open("ab") as log:
            self.process = ForkedCommand(command, log.fileno(), log.fileno(), self._environment)
        wait_until(lambda: b"serves at" in self.log())
        return self.process

    def log(self) -> bytes:
        return (self.folder / "log").read_bytes()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        (self.folder / "log").write_bytes(b"")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self.folder)
        shutil.rmtree(self.memory)


class Engine:
    """Does what vLLM does around the connector: it makes tensors and requests, and runs steps."""

    def __init__(
        self,
        pool: Pool,
        group: bytes = GROUP,
        seed: int = 0,
        wait_s: float = 60.0,
        staged: bool = False,
        hybrid: bool = False,
        ranks: int = 1,
    ) -> None:
        """With `hybrid`, each layer is in a KVCache group of its own, and all layers but the first
        have a sliding window."""
        names = [f"layer.{number}" for number in range(NUM_LAYERS)]
        generator = torch.Generator().manual_seed(seed)
        self.caches = {
            name: torch.randn(SHAPE, generator=generator).to(torch.bfloat16) for name in names
        }
        groups: list[tuple[list[str], Any]] = [(names, FullAttentionSpec())]
        if hybrid:
            specs = [FullAttentionSpec(), SlidingWindowSpec(), SlidingWindowSpec()]
            groups = [([name], spec) for name, spec in zip(names, specs, strict=True)]
        config = SimpleNamespace(
            num_blocks=NUM_BLOCKS,
            kv_cache_groups=[
                SimpleNamespace(layer_names=names, kv_cache_spec=spec) for names, spec in groups
            ],
            kv_cache_tensors=[],
        )
        layout = CacheLayout.of(self.caches, config)
        kinds = kinds_of(layout)
        self.names = names
        self.group_of = {name: number for number, (names, _) in enumerate(groups) for name in names}
        self.workers = [
            WorkerSide(
                [
                    self.space_of(pool, group, layout, kind, staged, (rank, ranks, len(kinds)))
                    for kind in kinds
                ]
            )
            for rank in range(ranks)
        ]
        self.worker = self.workers[0]
        self.scheduler = SchedulerSide(pool.socket, BLOCK_TOKENS, time.monotonic, Adapters(""))
        self.users = BlockUsers()
        windows = windows_of(layout.groups)
        ready = [RankReady(group, rank, ranks, "", windows) for rank in range(ranks)]
        self.scheduler.begin(ready, self.users)
        self.windows, self.groups = windows, range(len(windows))
        self.blocks: dict[str, list[list[int]]] = {}
        self.next_block = 1
        self.number = 0
        sides: list[WorkerSide | SchedulerSide] = [*self.workers, self.scheduler]
        wait_until(lambda: all(s.is_connected for s in sides), "it did not happen", wait_s)

    def space_of(
        self,
        pool: Pool,
        group: bytes,
        layout: CacheLayout,
        kind: BlockKind,
        staged: bool,
        place: tuple[int, int, int],
    ) -> SpaceClient:
        """`place` holds a rank, the number of ranks, and how many ranks of each kind there are."""
        rank, ranks, kinds = place
        number = rank * kinds + kind.index
        nominal = BlockLayout(
            model_fingerprint=f"m {number}",
            dtype="bfloat16",
            block_tokens=1,
            num_layers=kind.num_slices,
            num_kv_heads=1,
            head_dim=layout.slice_bytes // 4,
            inner="vllm",
        )
        attach = AttachRank(
            protocol=PROTOCOL,
            group=group,
            model="m",
            rank=number,
            num_ranks=ranks * kinds,
            block_tokens=BLOCK_TOKENS,
            layout=nominal,
            window_blocks=kind.window_blocks,
        )
        copier: BlockCopier = HostCopier(layout, kind, open_mover())
        if staged:
            copier = DeviceCopier(layout, kind, open_mover(), self.caches)
        return SpaceClient(pool.socket, attach, layout, kind, copier)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()

    def request(self, tokens: list[int], **more: Any) -> Any:
        self.number += 1
        return SimpleNamespace(
            request_id=f"r{self.number}-{id(self)}",
            all_token_ids=list(tokens),
            num_tokens=len(tokens),
            num_computed_tokens=0,
            **more,
        )

    def keys_of(self, tokens: list[int]) -> list[bytes]:
        return list(block_keys(tokens, BLOCK_TOKENS, root_of(self.request(tokens))))

    def take_blocks(self, request: Any) -> list[int]:
        count = -(-request.num_tokens // BLOCK_TOKENS)
        if self.next_block + count > NUM_BLOCKS:
            self.next_block = 1
        ids = list(range(self.next_block, self.next_block + count))
        self.next_block += count
        self.blocks[request.request_id] = [self.ids_of(ids, group) for group in self.groups]
        return ids

    def ids_of(self, ids: list[int], group: int) -> list[int]:
        """Returns the block ids of a group, which differ between groups."""
        return [1 + (block - 1 + 7 * group) % (NUM_BLOCKS - 1) for block in ids]

    def run_step(self, step: StepTransfers) -> None:
        for worker in self.workers:
            worker.preempt(step.preempted)
            worker.begin_step(step)
            worker.end_step()
            self.hear(worker)

    def hear(self, worker: WorkerSide) -> None:
        ended = worker.take_ended()
        if ended is not None:
            self.scheduler.on_ended(ended)

    def output(self, *requests: Any, tokens: int = 1) -> Any:
        scheduled = {one.request_id: tokens for one in requests}
        return SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=tokens * len(scheduled),
            preempted_req_ids=set(),
        )

    def build(self, *requests: Any, tokens: int = 1) -> StepTransfers:
        return self.scheduler.build(self.output(*requests, tokens=tokens), self.blocks.__getitem__)

    def prefill(self, request: Any, seed: int) -> int:
        """Loads what the pool has, "computes" the rest, and stores it. Returns the number of loaded
        tokens: 0 if a block was wrong."""
        self.scheduler.on_new_request(request)
        found: int | None = None
        while found is None:
            found = self.scheduler.matched_tokens(request, 0)
        ids = self.take_blocks(request)
        self.slide(request, found)
        self.scheduler.on_allocated(request, self.blocks[request.request_id], found)
        if found:
            self.run_step(self.build())
            loaded = [worker.take_loaded() for worker in self.workers]
            assert all(done == {request.request_id} for done, _ in loaded)
            if any(failed for _, failed in loaded):
                ids, found = self.take_blocks(request), 0
        request.num_computed_tokens = 0
        self.run_step(self.build(request, tokens=request.num_tokens))
        generator = torch.Generator().manual_seed(seed)
        for name in self.names:
            fresh = torch.randn((len(ids), *SHAPE[1:]), generator=generator).to(torch.bfloat16)
            for index, block in enumerate(self.ids_of(ids, self.group_of[name])):
                if index * BLOCK_TOKENS >= found:
                    self.caches[name][block] = fresh[index]
        request.num_computed_tokens = request.num_tokens
        request.all_token_ids.append(7)
        request.num_tokens += 1
        return found

    def slide(self, request: Any, num_tokens: int) -> list[tuple[str, int]]:
        """Releases blocks as vLLM does before a step: the request no longer holds blocks that lie
        behind all windows. Returns the blocks that nobody uses any more, by layer."""
        free = []
        first = max(num_tokens - WINDOW_TOKENS + 1, 0) // BLOCK_TOKENS
        for name in self.names:
            group = self.group_of[name]
            if not self.windows[group]:
                continue
            table = self.blocks[request.request_id][group]
            for index, block in enumerate(table[:first]):
                if block and not self.users.users[block]:
                    free.append((name, block))
                table[index] = 0
        return free

    def finish(self, request: Any) -> None:
        table = self.blocks.pop(request.request_id)
        if not self.scheduler.on_finished(request, table):
            return
        self.run_step(self.build())
        for worker in self.workers:
            self.wait_for_stores(worker, request)
        # An answer to a later `find` means that the pool has handled the earlier stores.
        self.look_up(request.all_token_ids[:-1])

    def wait_for_stores(self, worker: WorkerSide, request: Any) -> None:
        wait_until(lambda: request.request_id in worker.take_finished(False))
        self.hear(worker)

    def look_up(self, tokens: list[int]) -> int:
        """Returns how many tokens of a prompt the pool has."""
        request = self.request(tokens)
        self.scheduler.on_new_request(request)
        found: int | None = None
        while found is None:
            found = self.scheduler.matched_tokens(request, 0)
        self.scheduler.on_allocated(request, [], 0)
        self.scheduler.on_finished(request, [[] for _ in self.windows])
        return found

    def content(self, ids: list[int]) -> list[np.ndarray]:
        """Returns the bytes of blocks in each layer. `ids` are the block ids of the first group."""
        found = []
        for name in self.names:
            mine = self.ids_of(ids, self.group_of[name])
            found.append(self.caches[name][mine].view(torch.uint8).numpy().copy())
        return found
