"""Attention workers as processes of their own, for benchmarks, and engines that use them."""

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

from moonpool.attention.client import AttentionClient, Wanted, connect, ring_bytes, spin_s
from moonpool.attention.home import HomeClient, keep_at_home
from moonpool.attention.keeper import Keeper
from moonpool.attention.partition import HeadRange, Partition, share_heads
from moonpool.attention.port import Port
from moonpool.attention.remote_ops import Home, RemoteOps
from moonpool.bench.attention_child import SECRET_VARIABLE
from moonpool.engine.builtin import LoadedModel
from moonpool.engine.ops import HeadShape, KvCache
from moonpool.engine.runner import Engine
from moonpool.engine.split_choice import choose_split_ops
from moonpool.engine.step import Draw, SequenceStep
from moonpool.kvcache.layout import DTYPE_BYTES, BlockLayout
from moonpool.kvcache.transfers import PeerAddress
from moonpool.messenger.arena import Arena
from moonpool.runtime.cores import usable_cores
from moonpool.types import BlockId, InstanceId, RequestId, SamplingParams

MAX_ROWS = 256
GREEDY = Draw(SamplingParams(temperature=0.0), (), ())


class _Child:
    """One attention worker's process; ends with the benchmark."""

    def __init__(self, number: int, secret: bytes) -> None:
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "moonpool.bench.attention_child", f"attention-{number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {SECRET_VARIABLE: secret.hex(), "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self.address = msgspec.json.decode(line, type=PeerAddress)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Crew:
    """Made by `crew`. Each worker has `each` blocks, or its heads of the same `each` blocks; after
    them come `home_blocks` of the engine's own process."""

    def __init__(
        self, model: LoadedModel, layout: BlockLayout, children: Sequence[_Child], each: int,
        secret: bytes, by_head: bool, home_blocks: int,
    ) -> None:  # fmt: skip
        self.model = model
        self.layout = layout
        self.each = each
        self._children = children
        self._secret = secret
        self._head_ranges: Sequence[HeadRange] = ()
        if by_head:
            self._head_ranges = share_heads(layout.num_kv_heads, len(children))
        self._numbers = itertools.count(1)  # of all engines' steps: they share the connections
        self._wanted = self._make_wanted()
        self.clients = [self._connect(number, use_shm=True) for number in range(len(children))]
        self._home = self._at_home(home_blocks) if home_blocks else None

    def _at_home(self, num_blocks: int) -> HomeClient:
        name = self._wanted.owner
        keeper = Keeper(name, self._secret, choose_split_ops(), Arena, "127.0.0.1", True)
        return keep_at_home(keeper, msgspec.structs.replace(self._wanted, num_blocks=num_blocks))

    def _make_wanted(self) -> Wanted:
        spec = self.model.spec
        heads = HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
        return Wanted(
            owner=InstanceId("bench"),
            layout=self.layout,
            heads=spec.num_heads,
            head_dim=spec.head_dim,
            scale=spec.head_dim**-0.5,
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
        client.listen(lambda told: None, lambda why: None)
        return client

    def first_by_socket(self) -> AttentionClient:
        """The first worker's steps over a socket. Whoever attaches last owns it: use `by_rings`
        afterwards."""
        self.clients[0].close()
        self.clients[0] = self._connect(0, use_shm=False)
        return self.clients[0]

    def by_rings(self) -> None:
        self.clients[0].close()
        self.clients[0] = self._connect(0, use_shm=True)

    def engine(self, staggered: bool = False, early_query: bool = True) -> tuple[Engine, RemoteOps]:
        ports: list[Port] = [client.port for client in self.clients]
        sizes, home = [self.each] * len(ports), None
        if self._home is not None:
            home = Home(len(ports), self._home.hand)
            sizes.append(self._home.attached.num_blocks)
        partition = Partition(sizes, self._head_ranges)
        ops = RemoteOps(
            choose_split_ops(),
            ports,
            partition.placement,
            early_query,
            self._head_ranges,
            self._numbers,
            home=home,
        )
        kind = torch.bfloat16 if self.layout.dtype == "bfloat16" else torch.float32
        shape = (sum(partition.sizes), self.layout.num_layers, self.layout.slice_elements)
        cache = KvCache(torch.empty(1, 1, 1, dtype=kind).expand(shape), self.layout)
        return Engine(self.model, ops, cache, staggered=staggered), ops

    def close(self) -> None:
        for client in self.clients:
            client.close()
        if self._home is not None:
            self._home.close()


@contextlib.contextmanager
def crew(
    model: LoadedModel, layout: BlockLayout, num_workers: int, each: int, by_head: bool = False,
    home_blocks: int = 0,
) -> Iterator[Crew]:  # fmt: skip
    """Raises AttentionError, or ValueError if there are fewer heads than workers."""
    secret = secrets.token_bytes(32)
    with contextlib.ExitStack() as stack:
        children = []
        for number in range(num_workers):
            children.append(_Child(number, secret))
            stack.callback(children[-1].close)
        made = Crew(model, layout, children, each, secret, by_head, home_blocks)
        stack.callback(made.close)
        yield made


class Decodes:
    """A batch at one context, in memories of so many blocks each; their old tokens are whatever is
    in the blocks. Neighbours lie in different memories as long as there is room, and so do the
    neighbouring `segment_blocks` of each, if that is not 0."""

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
                assert worker is not None, "no memory has room for it"
                first, next_free[worker] = next_free[worker], next_free[worker] + count
                blocks += map(BlockId, range(first, first + count))
            entry = SequenceStep(RequestId(str(i)), [i % 256], context, blocks, GREEDY)
            self.entries.append(entry)

    def seconds(self, engine: Engine) -> float:
        return engine.step(self.entries).seconds
