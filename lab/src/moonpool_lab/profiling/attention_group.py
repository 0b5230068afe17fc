"""Starts attention workers as processes, with engines that use them, and times steps.

A step with attention workers is timed in total and by part: model, attention, waiting.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence

import msgspec
import torch

from moonpool.cores import usable_cores
from moonpool.protocol.block_layout import DTYPE_BYTES, BlockLayout
from moonpool.protocol.messages import AttemptId
from moonpool.protocol.transfer_events import PeerAddress
from moonpool.scheduler.actions import StepEntry
from moonpool.types import BlockId, InstanceId, SamplingParams, Struct
from moonpool_engine.attention_offload.channel import AttentionChannel
from moonpool_engine.attention_offload.client import (
    AttachOptions,
    AttentionClient,
    AttentionError,
    LocalAttentionWorker,
    connect,
    ring_bytes,
    spin_s,
    start_local_attention,
)
from moonpool_engine.attention_offload.partition import Partition, share_heads
from moonpool_engine.attention_offload.remote_ops import LocalPartition, RemoteOps
from moonpool_engine.attention_offload.wire import KvHeadRange, LayerRule
from moonpool_engine.attention_offload.worker_state import AttentionWorkerState
from moonpool_engine.engine.builtin import LoadedModel
from moonpool_engine.engine.layers import attend_rules
from moonpool_engine.engine.model import head_shape
from moonpool_engine.engine.ops import KvCache, block_dtype
from moonpool_engine.engine.runner import Engine, choose_split_ops
from moonpool_engine.transfer.arena import Arena
from moonpool_lab.profiling.attention_process import SECRET_VARIABLE

MAX_ROWS = 256
GREEDY = SamplingParams(temperature=0.0)


class _Child:
    """The process of one attention worker, which ends with the measurement."""

    def __init__(self, number: int, secret: bytes) -> None:
        """Raises AttentionError if the process ends as it starts."""
        self._process = subprocess.Popen(  # noqa: S603
            [
                sys.executable,
                "-m",
                "moonpool_lab.profiling.attention_process",
                f"attention-{number}",
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {SECRET_VARIABLE: secret.hex(), "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self.close()
            raise AttentionError(f"the process of attention worker {number} ended as it started")
        self.address = msgspec.json.decode(line, type=PeerAddress)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class LocalAttentionGroup:
    """The attention workers of one engine; `open_attention_group` makes the group.

    Each worker has `each` blocks, or its heads of `each` blocks. The `own_blocks` of the engine's
    own process follow the workers' blocks.
    """

    def __init__(
        self, model: LoadedModel, layout: BlockLayout, children: Sequence[_Child], each: int,
        secret: bytes, by_head: bool, own_blocks: int,
    ) -> None:  # fmt: skip
        self.model = model
        self.layout = layout
        self.each = each
        self._children = children
        self._secret = secret
        self._head_ranges: Sequence[KvHeadRange] = ()
        if by_head:
            self._head_ranges = share_heads(layout.num_kv_heads, len(children))
        self._numbers = itertools.count(
            1
        )  # all engines count steps together, because they share connections
        self._wanted = self._make_wanted()
        self.clients = [self._connect(number, use_shm=True) for number in range(len(children))]
        self._local = self._start_local(own_blocks) if own_blocks else None

    def _start_local(self, num_blocks: int) -> LocalAttentionWorker:
        name = self._wanted.owner
        state = AttentionWorkerState(
            name, self._secret, choose_split_ops(), Arena, "127.0.0.1", True
        )
        return start_local_attention(
            state, msgspec.structs.replace(self._wanted, num_blocks=num_blocks)
        )

    def _make_wanted(self) -> AttachOptions:
        spec = self.model.spec
        heads = head_shape(spec)
        return AttachOptions(
            owner=InstanceId("bench"),
            layout=self.layout,
            heads=heads,
            scale=spec.scale(),
            rules=tuple(LayerRule.of(rule) for rule in attend_rules(spec, self.model.weights)),
            num_blocks=self.each,
            threads=1,
            ring_bytes=ring_bytes(heads, DTYPE_BYTES[self.model.dtype], MAX_ROWS),
            spin_s=spin_s(len(self._children), 1, usable_cores()),
        )

    def _connect(self, number: int, use_shm: bool) -> AttentionClient:
        address, wanted = self._children[number].address, self._wanted
        if self._head_ranges:
            wanted = msgspec.structs.replace(wanted, kv_heads=self._head_ranges[number])
        client = connect(address, wanted.owner, self._secret, wanted, use_shm)
        client.listen(lambda message: None, lambda reason: None)
        return client

    def first_by_socket(self) -> AttentionClient:
        """Connects the first worker by a socket instead of rings; `by_rings` changes it back.

        The worker belongs to the client that connected last.
        """
        self.clients[0].close()
        self.clients[0] = self._connect(0, use_shm=False)
        return self.clients[0]

    def by_rings(self) -> None:
        """Connects the first worker by rings in shared memory."""
        self.clients[0].close()
        self.clients[0] = self._connect(0, use_shm=True)

    def engine(self, staggered: bool = False, early_query: bool = True) -> tuple[Engine, RemoteOps]:
        """Returns a new engine that uses the workers, and the operations of that engine."""
        channels: list[AttentionChannel] = [client.channel for client in self.clients]
        sizes, local = [self.each] * len(channels), None
        if self._local is not None:
            local = LocalPartition(len(channels), self._local.executor)
            sizes.append(self._local.attached.num_blocks)
        partition = Partition(sizes, self._head_ranges)
        ops = RemoteOps(
            choose_split_ops(),
            channels,
            partition.placement,
            early_query,
            self._head_ranges,
            self._numbers,
            local_partition=local,
        )
        kind = block_dtype(self.layout)
        shape = (sum(partition.sizes), self.layout.num_layers, self.layout.slice_elements)
        cache = KvCache(torch.empty(1, 1, 1, dtype=kind).expand(shape), self.layout)
        return Engine(self.model, ops, cache, staggered=staggered), ops

    def close(self) -> None:
        for client in self.clients:
            client.close()
        if self._local is not None:
            self._local.close()


@contextlib.contextmanager
def open_attention_group(
    model: LoadedModel, layout: BlockLayout, num_workers: int, each: int, by_head: bool = False,
    own_blocks: int = 0,
) -> Iterator[LocalAttentionGroup]:  # fmt: skip
    """Starts the workers and yields their group; ends the workers afterwards.

    Raises AttentionError, or ValueError if there are fewer heads than workers.
    """
    secret = secrets.token_bytes(32)
    with contextlib.ExitStack() as stack:
        children = []
        for number in range(num_workers):
            children.append(_Child(number, secret))
            stack.callback(children[-1].close)
        made = LocalAttentionGroup(model, layout, children, each, secret, by_head, own_blocks)
        stack.callback(made.close)
        yield made


class Decodes:
    """A batch of decodes with equal contexts, in memories of `sizes` blocks.

    The KVCache is whatever the blocks hold. Neighbouring sequences lie in different memories if
    there is room. Unless `segment_blocks` is 0, neighbouring segments of one sequence, each of
    `segment_blocks` blocks, also lie in different memories.
    """

    def __init__(
        self, batch: int, context: int, sizes: Sequence[int], block_tokens: int,
        segment_blocks: int = 0,
    ) -> None:  # fmt: skip
        self.batch = batch
        self.context = context
        size = -(-(context + 1) // block_tokens)
        piece = segment_blocks or size
        ends = list(itertools.accumulate(sizes))
        next_free = [end - own for end, own in zip(ends, sizes, strict=True)]
        self.entries = []
        for i in range(batch):
            blocks: list[BlockId] = []
            for number, begin in enumerate(range(0, size, piece)):
                count = min(piece, size - begin)
                nearest = ((i + number + further) % len(sizes) for further in range(len(sizes)))
                worker = next((w for w in nearest if next_free[w] + count <= ends[w]), None)
                assert worker is not None, "no memory has enough free blocks"
                first, next_free[worker] = next_free[worker], next_free[worker] + count
                blocks += map(BlockId, range(first, first + count))
            entry = StepEntry(AttemptId(str(i)), [i % 256], context, blocks, GREEDY)
            self.entries.append(entry)

    def seconds(self, engine: Engine) -> float:
        return engine.step(self.entries).seconds


class OffloadTimes(Struct, frozen=True):
    """The times of one step. `attention_s` is the busy time of each worker, `waited_s` the time
    that the model worker waited for the workers."""

    step_s: float
    attention_s: float
    waited_s: float

    @property
    def model_s(self) -> float:
        """The time in which the model worker computed and sent."""
        return self.step_s - self.waited_s

    @property
    def bound_s(self) -> float:
        """The step time if two batches take turns, so that the busier side never waits."""
        return max(self.model_s, self.attention_s)


def timed_step(engine: Engine, ops: RemoteOps, decodes: Decodes) -> OffloadTimes:
    """Runs one step and returns its times."""
    attending_ns, waited_ns = ops.attending_ns, ops.waited_ns
    seconds = decodes.seconds(engine)
    return OffloadTimes(
        step_s=seconds,
        attention_s=(ops.attending_ns - attending_ns) / 1e9 / ops.num_workers,
        waited_s=(ops.waited_ns - waited_ns) / 1e9,
    )


def by_time(ways: Sequence[OffloadTimes]) -> list[OffloadTimes]:
    """Sorts the steps by time, with the shortest first."""
    return sorted(ways, key=lambda way: way.step_s)


def median_times(ways: Sequence[OffloadTimes]) -> OffloadTimes:
    """Returns the times of the step whose total is the median."""
    return by_time(ways)[len(ways) // 2]
