"""Measures the time of a decode step whose KVCache is divided by request, by token range or by
head, compared with local attention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from statistics import median

from moonpool.config.tables import AttentionPartition
from moonpool.protocol.block_layout import BlockLayout
from moonpool.types import Struct
from moonpool_engine.attention_offload.partition import segment_blocks, share_heads
from moonpool_engine.attention_offload.remote_ops import RemoteOps
from moonpool_engine.engine.builtin import LoadedModel
from moonpool_engine.engine.ops import empty_cache
from moonpool_engine.engine.runner import Engine, choose_split_ops
from moonpool_lab.profiling.attention_group import (
    Decodes,
    OffloadTimes,
    median_times,
    open_attention_group,
    timed_step,
)


class PartitionCost(Struct, frozen=True):
    """`local_s`: the instance's own attention on one thread, measured in turns with the others.
    `busiest_s`: how long the attention worker with the most contexts was busy."""

    partition: AttentionPartition
    batch: int
    context_tokens: int
    local_s: float
    way: OffloadTimes
    busiest_s: float

    @property
    def bound_s(self) -> float:
        """The time if one side works after the other, with nothing for messages and waiting for a
        core."""
        return self.way.model_s + self.busiest_s


class _Case:
    """One partition's engine, and which blocks its sequences have."""

    def __init__(
        self, name: AttentionPartition, made: tuple[Engine, RemoteOps], workers: int, each: int
    ) -> None:
        self.name = name
        self.engine, self.ops = made
        self._layout = self.engine.layout
        self._workers = workers
        self._each = each

    def decodes(self, batch: int, context: int) -> Decodes:
        segment = segment_blocks(self.name, self._layout)
        arenas = 1 if self.name == "head" else self._workers
        return Decodes(batch, context, (self._each,) * arenas, self._layout.block_tokens, segment)

    def busiest_share(self, decodes: Decodes) -> float:
        """Returns the busiest worker's share of all attention, by blocks or heads."""
        if self.name == "head":
            counts = [h.count for h in share_heads(self._layout.num_kv_heads, self._workers)]
        else:
            found = Counter(b // self._each for entry in decodes.entries for b in entry.block_ids)
            counts = list(found.values())
        return max(counts) / sum(counts)


def measure_partitions(
    model: LoadedModel,
    layout: BlockLayout,
    num_workers: int,
    batches: Sequence[int],
    contexts: Sequence[int],
    repeats: int,
) -> tuple[PartitionCost, ...]:
    """Returns medians of steps that are measured in turns. Leaves out the division by head where
    the model has too few kv heads. Raises AttentionError."""
    each = max(batches) * (layout.blocks_for(max(contexts) + 1) + segment_blocks("tokens", layout))
    found = []
    with ExitStack() as stack:
        by_block = stack.enter_context(open_attention_group(model, layout, num_workers, each))
        cases = [
            _Case(name, by_block.engine(), num_workers, each) for name in ("request", "tokens")
        ]
        if layout.num_kv_heads >= num_workers:
            by_head = stack.enter_context(
                open_attention_group(model, layout, num_workers, each, by_head=True)
            )
            cases.append(_Case("head", by_head.engine(), num_workers, each))
        local = Engine(model, choose_split_ops(), empty_cache(layout, each))
        for context in contexts:
            for batch in batches:
                found += _in_turns(local, cases, batch, context, repeats)
    return tuple(found)


def _in_turns(
    local: Engine, cases: Sequence[_Case], batch: int, context: int, repeats: int
) -> list[PartitionCost]:
    own = Decodes(batch, context, (local.num_blocks,), local.layout.block_tokens)
    asked = [case.decodes(batch, context) for case in cases]
    local_s: list[float] = []
    ways: list[list[OffloadTimes]] = [[] for _ in cases]
    for turn in range(repeats + 1):
        once_s = own.seconds(local)
        timed = [timed_step(c.engine, c.ops, d) for c, d in zip(cases, asked, strict=True)]
        if turn:  # the first touches what is cold
            local_s.append(once_s)
            for kept, way in zip(ways, timed, strict=True):
                kept.append(way)
    found = []
    for case, decodes, kept in zip(cases, asked, ways, strict=True):
        way = median_times(kept)
        busiest_s = way.attention_s * case.ops.num_workers * case.busiest_share(decodes)
        found.append(PartitionCost(case.name, batch, context, median(local_s), way, busiest_s))
    return found


def partition_lines(costs: Sequence[PartitionCost]) -> Iterator[str]:
    """Yields the lines of the report; none if there are no costs."""
    if not costs:
        return
    yield "by partition, a decode step (ms), and in brackets what the model worker waited:"
    yield "  batch  context  partition   local            step  busiest attends  its bound"
    for cost in costs:
        way = cost.way
        yield (
            f"{cost.batch:>7} {cost.context_tokens:>8}  {cost.partition:<9}"
            f" {cost.local_s * 1e3:>7.2f} {way.step_s * 1e3:>7.2f} ({way.waited_s * 1e3:.2f})"
            f" {cost.busiest_s * 1e3:>16.2f} {cost.bound_s * 1e3:>10.2f}"
        )
