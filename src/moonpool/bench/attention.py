"""`moonpool bench attention`: what it costs to have attention done by other processes.

The same decode steps by an engine with its own KVCache and by one whose blocks lie at attention
workers; one message there and back, beside a bare ping-pong through shared memory; and how many
requests fit. Every figure is the best of several runs, in turns.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

import msgspec
import torch

from moonpool.attention.client import AttentionClient, Wanted, connect, ring_bytes
from moonpool.attention.plan import Placement
from moonpool.attention.port import RING_DATA_BYTES, Port
from moonpool.attention.remote_ops import RemoteOps
from moonpool.attention.wire import ECHO, Header
from moonpool.bench.attention_child import SECRET_VARIABLE
from moonpool.engine.builtin import LoadedModel, open_model
from moonpool.engine.native.library import open_rings
from moonpool.engine.ops import HeadShape, KvCache, empty_cache
from moonpool.engine.runner import Engine, make_layout
from moonpool.engine.split_choice import choose_split_ops
from moonpool.engine.step import Draw, SequenceStep
from moonpool.kvcache.layout import DTYPE_BYTES, BlockLayout
from moonpool.kvcache.transfers import PeerAddress
from moonpool.types import InstanceId, RequestId, SamplingParams, Struct

BLOCK_TOKENS = 64
PING_ROUNDS = 2000
GREEDY = Draw(SamplingParams(temperature=0.0), (), ())


class RoundTrip(Struct, frozen=True):
    """Of one message, in seconds; `bare_s` is two threads in C through the same kind of ring."""

    num_bytes: int
    bare_s: float
    ring_s: float
    socket_s: float


class StepCost(Struct, frozen=True):
    batch: int
    context_tokens: int
    local_s: float
    remote_s: float
    staggered_s: float
    layers: int

    @property
    def per_layer_s(self) -> float:
        """What a layer takes longer for its attention being elsewhere."""
        return (self.remote_s - self.local_s) / self.layers


class AttentionResult(Struct, frozen=True):
    model: str
    workers: int
    round_trips: tuple[RoundTrip, ...]
    steps: tuple[StepCost, ...]
    own_requests: int  # that fit the model worker's memory, if it has as much as one of the others
    offloaded_requests: int


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


def bench_attention(
    model_name: str,
    num_workers: int,
    batches: Sequence[int],
    contexts: Sequence[int],
    repeats: int,
    dtype: str,
) -> AttentionResult:
    """Takes a minute. Raises AttentionError or ValueError."""
    torch.set_num_threads(1)
    model = open_model(model_name, dtype)
    local_ops = choose_split_ops()
    layout = make_layout(model, BLOCK_TOKENS, local_ops)
    longest = layout.blocks_for(max(contexts) + 1)
    each = -(-max(batches) // num_workers) * longest
    secret = secrets.token_bytes(32)
    with contextlib.ExitStack() as stack:
        children = [_Child(i, secret) for i in range(num_workers)]
        for child in children:
            stack.callback(child.close)
        wanted = _wanted(model, layout, each)
        clients = [_connect(child, secret, wanted, use_shm=True) for child in children]
        for client in clients:
            stack.callback(client.close)
        trips = _round_trips(clients[0].port, children[0], secret, wanted, clients, layout)
        local = Engine(model, local_ops, empty_cache(layout, each * num_workers))
        remote = _remote(model, layout, clients, each, staggered=False)
        staggered = _remote(model, layout, clients, each, staggered=True)
        steps = [
            _steps((local, remote, staggered), _Batch(batch, context, num_workers, each), repeats)
            for context in contexts
            for batch in batches
        ]
    return AttentionResult(
        model=model_name,
        workers=num_workers,
        round_trips=trips,
        steps=tuple(steps),
        own_requests=each // longest,
        offloaded_requests=num_workers * (each // longest),
    )


def _wanted(model: LoadedModel, layout: BlockLayout, num_blocks: int) -> Wanted:
    spec = model.spec
    heads = HeadShape(spec.num_heads, spec.num_kv_heads, spec.head_dim)
    return Wanted(
        owner=InstanceId("bench"),
        layout=layout,
        heads=spec.num_heads,
        head_dim=spec.head_dim,
        scale=spec.head_dim**-0.5,
        num_blocks=num_blocks,
        threads=1,
        ring_bytes=ring_bytes(heads, DTYPE_BYTES[model.dtype], 256),
    )


def _connect(child: _Child, secret: bytes, wanted: Wanted, use_shm: bool) -> AttentionClient:
    client = connect(child.address, wanted.owner, secret, wanted, use_shm)
    client.listen(lambda told: None, lambda why: None)
    return client


def _remote(
    model: LoadedModel,
    layout: BlockLayout,
    clients: Sequence[AttentionClient],
    each: int,
    staggered: bool,
) -> Engine:
    placement = Placement((each,) * len(clients))
    ops = RemoteOps(choose_split_ops(), [client.port for client in clients], placement)
    kind = torch.bfloat16 if layout.dtype == "bfloat16" else torch.float32
    shape = (each * len(clients), layout.num_layers, layout.slice_elements)
    cache = KvCache(torch.empty(1, 1, 1, dtype=kind).expand(shape), layout)
    return Engine(model, ops, cache, staggered=staggered)


class _Batch:
    """Decodes at one context, shared out evenly; their old tokens are whatever is in the blocks."""

    def __init__(self, batch: int, context: int, num_workers: int, each: int) -> None:
        self.batch = batch
        self.context = context
        size = -(-(context + 1) // BLOCK_TOKENS)
        self.entries = []
        for i in range(batch):
            first = i % num_workers * each + i // num_workers * size
            blocks = list(range(first, first + size))
            entry = SequenceStep(RequestId(str(i)), [i % 256], context, blocks, GREEDY)
            self.entries.append(entry)


def _steps(engines: tuple[Engine, Engine, Engine], batch: _Batch, repeats: int) -> StepCost:
    best = [float("inf")] * 3
    for _ in range(repeats + 1):  # the first touches what is cold
        for i, engine in enumerate(engines):
            best[i] = min(best[i], engine.step(batch.entries).seconds)
    return StepCost(
        batch=batch.batch,
        context_tokens=batch.context,
        local_s=best[0],
        remote_s=best[1],
        staggered_s=best[2],
        layers=engines[0].layout.num_layers,
    )


def _round_trips(
    port: Port,
    child: _Child,
    secret: bytes,
    wanted: Wanted,
    clients: list[AttentionClient],
    layout: BlockLayout,
) -> tuple[RoundTrip, ...]:
    """Sockets first: whoever attaches last owns the worker, and the rings are used afterwards."""
    row_bytes = (wanted.heads + 2 * layout.num_kv_heads) * layout.head_dim
    row_bytes *= DTYPE_BYTES[layout.dtype]
    sizes = (64, row_bytes)
    plain = _connect(child, secret, wanted, use_shm=False)
    sockets = [_echo_s(plain.port, size) for size in sizes]
    plain.close()
    clients[0] = _connect(child, secret, wanted, use_shm=True)
    rings = [_echo_s(clients[0].port, size) for size in sizes]
    return tuple(
        RoundTrip(num_bytes=size, bare_s=bare_s(size), ring_s=ring, socket_s=sock)
        for size, ring, sock in zip(sizes, rings, sockets, strict=True)
    )


def _echo_s(port: Port, size: int) -> float:
    payload, back = memoryview(bytearray(size)), memoryview(bytearray(size))
    header = Header(size, ECHO, 0, 0)
    best_s = float("inf")
    for _ in range(5):
        began_s = time.perf_counter()
        for _ in range(PING_ROUNDS // 5):
            port.send(header, payload)
            port.receive()
            port.receive_into(back)
        best_s = min(best_s, (time.perf_counter() - began_s) / (PING_ROUNDS // 5))
    return best_s


def bare_s(size: int, spin_s: float = 20e-6) -> float:
    """The machine's own limit: two threads in C, through rings like ours, waiting as ours do."""
    rings = open_rings()
    if rings is None or size > 4096:
        return float("nan")
    capacity, ping = 1 << 16, rings.ping
    with _memory(2 * (RING_DATA_BYTES + capacity)) as base:
        back = base + RING_DATA_BYTES + capacity
        arguments = (base, back, capacity, size, PING_ROUNDS, int(spin_s * 1e9))
        answering = threading.Thread(target=ping, args=(*arguments, 1))
        answering.start()
        nanoseconds = ping(*arguments, 0)
        answering.join()
    return nanoseconds / 1e9


@contextlib.contextmanager
def _memory(size: int) -> Iterator[int]:
    memory = mmap.mmap(-1, size)
    held = ctypes.c_char.from_buffer(memory)
    yield ctypes.addressof(held)
    del held


def lines(result: AttentionResult) -> list[str]:
    """The report."""
    said = [f"{result.model}, {result.workers} attention workers"]
    said.append("one message there and back (us):   bytes   bare C   rings   ratio   socket")
    for trip in result.round_trips:
        said.append(
            f"{trip.num_bytes:>40} {trip.bare_s * 1e6:>8.1f} {trip.ring_s * 1e6:>7.1f}"
            f" {trip.ring_s / trip.bare_s:>7.1f} {trip.socket_s * 1e6:>8.1f}"
        )
    said.append("a decode step (ms):  batch  context   local  offloaded  per layer (us)  staggered")
    for step in result.steps:
        said.append(
            f"{step.batch:>26} {step.context_tokens:>8} {step.local_s * 1e3:>7.2f}"
            f" {step.remote_s * 1e3:>10.2f} {step.per_layer_s * 1e6:>15.0f}"
            f" {step.staggered_s * 1e3:>10.2f}"
        )
    said.append(
        f"requests of {result.steps[-1].context_tokens} tokens that fit: {result.own_requests} in"
        f" one memory, {result.offloaded_requests} at {result.workers} attention workers"
    )
    return said
