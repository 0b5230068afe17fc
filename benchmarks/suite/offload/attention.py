"""`moonpool bench attention`: measures the cost of computing attention in other processes.

Measures the same decode steps on an engine with its own KVCache and on one whose blocks are at
attention workers, with and without early queries, as one batch and as two staggered batches. The
report divides the time of each step. Every step is the best of several runs. The steps take turns,
except those on all threads. With several workers, each way to divide the KVCache among them is
measured, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from benchmarks.suite.offload.attention_messages import RoundTrip, echo_s, measure_round_trip
from benchmarks.suite.offload.attention_messages import lines as message_lines
from benchmarks.suite.offload.attention_partitions import (
    PartitionCost,
    measure_partitions,
    partition_lines,
)
from moonpool.cores import usable_cores
from moonpool.protocol.block_layout import DTYPE_BYTES
from moonpool.types import Struct
from moonpool_engine.attention_offload.remote_ops import RemoteOps
from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.ops import empty_cache
from moonpool_engine.engine.runner import Engine, choose_split_ops, make_layout
from moonpool_lab.profiling.attention_group import (
    Decodes,
    LocalAttentionGroup,
    OffloadTimes,
    open_attention_group,
    timed_step,
)

BLOCK_TOKENS = 64


class AttentionStepCost(Struct, frozen=True):
    """`local_s` on one thread, `local_all_s` on as many as model and attention workers have."""

    batch: int
    context_tokens: int
    layers: int
    local_s: float
    local_all_s: float
    late: OffloadTimes  # K and V awaited before attention begins
    early: OffloadTimes
    staggered: OffloadTimes

    @property
    def per_layer_s(self) -> float:
        """The additional time of a layer because its attention is at other processes."""
        return (self.early.step_s - self.local_s) / self.layers


class AttentionResult(Struct, frozen=True):
    model: str
    workers: int
    cores: int
    round_trips: tuple[RoundTrip, ...]
    steps: tuple[AttentionStepCost, ...]
    partitions: tuple[PartitionCost, ...] = ()  # of one worker there is nothing to share out


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
    layout = make_layout(model, BLOCK_TOKENS, choose_split_ops())
    longest = layout.blocks_for(max(contexts) + 1)
    each = -(-max(batches) // num_workers) * longest
    with open_attention_group(model, layout, num_workers, each) as made:
        trips = _round_trips(made)
        local = Engine(model, choose_split_ops(), empty_cache(layout, each * num_workers))
        ways = (
            made.engine(early_query=False),
            made.engine(),
            made.engine(staggered=True),
        )
        sizes = (each,) * num_workers
        steps = [
            _step(local, ways, Decodes(batch, context, sizes, BLOCK_TOKENS), repeats)
            for context in contexts
            for batch in batches
        ]
    partitions: tuple[PartitionCost, ...] = ()
    if num_workers > 1:
        partitions = measure_partitions(model, layout, num_workers, batches, contexts, repeats)
    return AttentionResult(model_name, num_workers, usable_cores(), trips, tuple(steps), partitions)


def _step(
    local: Engine, ways: Sequence[tuple[Engine, RemoteOps]], decodes: Decodes, repeats: int
) -> AttentionStepCost:
    workers = ways[0][1].num_workers
    threads = min(1 + workers, usable_cores())
    local_s, all_s = [], []
    found: list[list[OffloadTimes]] = [[] for _ in ways]
    for turn in range(repeats + 1):
        once_s = decodes.seconds(local)
        timed = [timed_step(engine, ops, decodes) for engine, ops in ways]
        if turn:  # the first touches what is cold
            local_s.append(once_s)
            for kept, way in zip(found, timed, strict=True):
                kept.append(way)
    # Apart: threads that have done their part look for more, and would take a core from the others.
    torch.set_num_threads(threads)
    for turn in range(repeats + 1):
        once_s = decodes.seconds(local)
        if turn:
            all_s.append(once_s)
    torch.set_num_threads(1)
    late, early, staggered = (min(kept, key=lambda way: way.step_s) for kept in found)
    return AttentionStepCost(
        batch=decodes.batch,
        context_tokens=decodes.context,
        layers=local.layout.num_layers,
        local_s=min(local_s),
        local_all_s=min(all_s),
        late=late,
        early=early,
        staggered=staggered,
    )


def _round_trips(made: LocalAttentionGroup) -> tuple[RoundTrip, ...]:
    layout, spec = made.layout, made.model.spec
    row_bytes = (spec.num_heads + 2 * layout.num_kv_heads) * layout.head_dim
    sizes = (64, row_bytes * DTYPE_BYTES[layout.dtype])
    channel = made.first_by_socket().channel
    sockets = [echo_s(channel, size) for size in sizes]
    made.by_rings()
    channel = made.clients[0].channel
    pairs = zip(sizes, sockets, strict=True)
    return tuple(measure_round_trip(size, channel, socket_s) for size, socket_s in pairs)


def lines(result: AttentionResult) -> Iterator[str]:
    """The report."""
    yield f"{result.model}, {result.workers} attention workers, {result.cores} cores"
    yield from message_lines(result.round_trips)
    yield "a decode step (ms), and in brackets what the model worker waited:"
    yield (
        "  batch  context   local  local, all threads  late query   early query   per layer (us)"
        "  staggered     its bound"
    )
    for step in result.steps:
        yield (
            f"{step.batch:>7} {step.context_tokens:>8} {step.local_s * 1e3:>7.2f}"
            f" {step.local_all_s * 1e3:>19.2f} {_words(step.late)} {_words(step.early)}"
            f" {step.per_layer_s * 1e6:>14.0f} {_words(step.staggered)}"
            f" {step.staggered.bound_s * 1e3:>10.2f}"
        )
    yield "of each layer (us): model | attention | waited, as one batch; and as two that take turns"
    for step in result.steps:
        yield (
            f"{step.batch:>7} {step.context_tokens:>8}   {_layer(step.early, step.layers)};"
            f" {_layer(step.staggered, step.layers)}"
        )
    yield from partition_lines(result.partitions)


def _words(way: OffloadTimes) -> str:
    return f"{way.step_s * 1e3:>7.2f} ({way.waited_s * 1e3:.2f})"


def _layer(way: OffloadTimes, layers: int) -> str:
    parts = (way.model_s, way.attention_s, way.waited_s)
    return " | ".join(f"{part / layers * 1e6:.0f}" for part in parts)
