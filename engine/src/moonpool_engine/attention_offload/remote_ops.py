"""`Ops` with remote attention: dense operations run here, the KVCache lies at attention workers.

Model code is the same as with local `Ops`. `rope_store` sends Q, so that attention over old tokens
can begin, then K and V; `attend` receives the results. Rows are independent, and a split sequence
is merged in the order of its tokens, so results equal those of the local operations bit by bit.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from moonpool_engine.attention_offload.channel import (
    AttentionChannel,
    AttentionChannelError,
    Payload,
    view_of,
)
from moonpool_engine.attention_offload.executor import AttentionExecutor, ExecutorStep
from moonpool_engine.attention_offload.partition import (
    StepShares,
    WorkerBlockRanges,
    WorkerShare,
    for_all,
    split_step,
)
from moonpool_engine.attention_offload.wire import (
    ATTENDED,
    FAILED,
    KEYS_VALUES,
    MAX_TEXT_BYTES,
    PLAN,
    Header,
    KvHeadRange,
    Q,
)
from moonpool_engine.engine.ops import (
    AttendArgs,
    HeadShape,
    KvCache,
    QkNorm,
    RopeTable,
    SplitOps,
    StepMeta,
)

STEP_NUMBERS = 1 << 32  # a header has 32 bits for the step
MAX_STEPS = 2
"""The most steps under way at the same time: two batches that take turns (staggered pipelining)."""


class AttentionLostError(RuntimeError):
    """An attention worker failed; `worker` is its index. The workers of `arena` are lost."""

    def __init__(self, worker: int, arena: int, why: str) -> None:
        super().__init__(f"attention worker {worker}: {why}")
        self.worker = worker
        self.arena = arena


class LocalPartition(NamedTuple):
    """The attention worker in this process: its index, which is the last, and its executor."""

    worker: int
    executor: AttentionExecutor


@dataclass(slots=True)
class _Step:
    """A step under way."""

    meta: StepMeta
    number: int
    shares: StepShares
    local_step: ExecutorStep | None = None


class RemoteOps:
    """Implements `Ops` over attention workers. Used by one thread; `replace` is thread-safe."""

    def __init__(
        self,
        local: SplitOps,
        channels: Sequence[AttentionChannel | None],
        placement: WorkerBlockRanges,
        early_query: bool = True,
        head_ranges: Sequence[KvHeadRange] = (),
        numbers: Iterator[int] | None = None,
        local_partition: LocalPartition | None = None,
    ) -> None:
        """`channels[w]` leads to worker w, which has the w-th block range of `placement`, or with
        `head_ranges` the w-th heads of all blocks; it is None while the worker is lost. The worker
        of `local_partition` has no channel. `numbers` gives step numbers; instances of RemoteOps
        that use the same channels must share it. `early_query`: whether workers attend to old
        tokens as soon as Q arrives."""
        count = f"{len(channels)}{'' if local_partition is None else ' with its own'}"
        self.name = f"{local.name}, {count} attention workers"
        self.arithmetic = local.arithmetic
        self.inner = local.inner
        self.without = local.without
        self.device = local.device
        self.linear = local.linear
        self.exact_linear = local.exact_linear
        self.rms_norm = local.rms_norm
        self.add_rms_norm = local.add_rms_norm
        self.glu = local.glu
        self.soft_cap = local.soft_cap
        self.delta_rule = local.delta_rule
        self._local = local
        self._channels = list(channels)
        self._placement = placement
        self._head_ranges = tuple(head_ranges)
        self.on_lost: Callable[[int, AttentionChannel], None] = lambda worker, channel: None
        # epoch of the next steps; set by `RemoteAttentionMessenger` before each step
        self.epoch = 0
        self.attending_ns = 0  # sum of the workers' own computing times, as they report them
        self.waited_ns = 0  # time spent waiting for the workers' results
        self._early_query = early_query
        self._local_partition = local_partition
        self._local_worker = -1 if local_partition is None else local_partition.worker
        self._steps: list[_Step] = []
        self._numbers = itertools.count(1) if numbers is None else numbers
        self._plans = msgspec.msgpack.Encoder()

    @property
    def num_workers(self) -> int:
        """Number of remote workers, lost ones included."""
        return len(self._channels)

    def replace(self, worker: int, channel: AttentionChannel | None) -> None:
        """Sets the channel of a worker that was lost (None) or replaced; closes the former one."""
        former, self._channels[worker] = self._channels[worker], channel
        if former is not None:
            former.close()

    def rope_store(
        self, qkv: Tensor, rope: RopeTable, qk_norm: QkNorm | None, args: AttendArgs
    ) -> Tensor:
        """Like `Ops.rope_store`: qkv [T, row_heads * head_dim] -> q [T, num_heads, head_dim]. Sends
        Q to all workers first, then K and V."""
        heads, cache, layer, meta, *_ = args
        step = self._step_of(meta, cache)
        q, kv = self._local.rope(qkv, heads, rope, qk_norm, meta)
        remote = [(w, share) for w, share in step.shares.shares.items() if w != self._local_worker]
        for worker, share in remote:
            rows = q[share.queries]
            if self._head_ranges:
                rows = self._head_ranges[worker].of_queries(q, heads)
            self._send(worker, Q, layer, step.number, rows.contiguous())
        for worker, share in remote:
            rows = kv[share.stores]
            if self._head_ranges:
                rows = self._head_ranges[worker].of_keys_values(kv, heads)
            self._send(worker, KEYS_VALUES, layer, step.number, rows.contiguous())
        if self._local_partition is not None and step.local_step is not None:
            share = step.shares.shares[self._local_partition.worker]
            self._local_partition.executor.store(
                step.local_step, kv[share.stores].contiguous(), layer
            )
        return q

    def attend(self, q: Tensor, args: AttendArgs) -> Tensor:
        """Like `Ops.attend`: q [T, num_heads, head_dim] -> [T, num_heads * value_dim]. Receives the
        workers' results, and merges the partials of split sequences."""
        heads, cache, layer, meta, _, rule = args
        step = self._step_of(meta, cache)
        width = heads.num_heads * heads.value_dim
        out = torch.empty(meta.num_rows, width, dtype=q.dtype)
        local_partials = self._attend_local(step, q, layer, out)
        began_ns = time.perf_counter_ns()
        partials: list[Tensor] = []
        for worker, share in step.shares.shares.items():
            if worker == self._local_worker:
                continue
            if self._head_ranges:
                columns = self._head_ranges[worker].columns(heads)
                own = out.new_empty(meta.num_rows, columns.stop - columns.start)
                self._receive(worker, share, layer, step.number, own, heads)
                out[:, columns] = own
                continue
            whole, part = self._receive(worker, share, layer, step.number, out, heads)
            if not isinstance(share.outputs, slice):
                out[share.outputs] = whole
            if part is not None:
                partials.append(part)
        self.waited_ns += time.perf_counter_ns() - began_ns
        merge = step.shares.merge
        if merge is not None:
            all_partials = torch.cat([*partials, *local_partials])
            out[merge.rows] = self._local.merge(
                all_partials, merge.order, merge.starts, out.dtype, rule.sinks
            )
        return out

    def _attend_local(self, step: _Step, q: Tensor, layer: int, out: Tensor) -> list[Tensor]:
        """Attends to the local partition while the workers attend to theirs. Writes outputs to
        `out` and returns partials."""
        if self._local_partition is None or step.local_step is None:
            return []
        share = step.shares.shares[self._local_partition.worker]
        results = self._local_partition.executor.attend(
            step.local_step, q[share.queries].contiguous(), layer
        )
        if share.num_whole:
            out[share.outputs] = results.pop(0)
        return results

    def _step_of(self, meta: StepMeta, cache: KvCache) -> _Step:
        """Returns the state of the step that `meta` describes. Begins it, and sends the plans to
        its workers, if it is new."""
        for step in self._steps:
            if step.meta is meta:
                return step
        shares = split_step(meta, self._placement, cache.layout.block_tokens, self.epoch)
        if self._head_ranges:
            shares = for_all(shares, len(self._head_ranges))
        step = _Step(meta, next(self._numbers) % STEP_NUMBERS, shares)
        for worker, share in shares.shares.items():
            plan = share.plan
            if self._local_partition is not None and worker == self._local_partition.worker:
                step.local_step = self._local_partition.executor.begin(plan)
                continue
            if not self._early_query:
                plan = msgspec.structs.replace(plan, early=False)
            body = bytearray(self._plans.encode(plan))
            self._send(worker, PLAN, 0, step.number, memoryview(body))
        self._steps = [*self._steps[-MAX_STEPS + 1 :], step]
        return step

    def _channel(self, worker: int) -> AttentionChannel:
        channel = self._channels[worker]
        if channel is None:
            raise self._lost_error(worker, "it is lost, and no other has replaced it yet")
        return channel

    def _send(self, worker: int, kind: int, layer: int, step: int, payload: Payload) -> None:
        channel = self._channel(worker)
        try:
            channel.send(Header(payload.nbytes, kind, layer, step), payload)
        except AttentionChannelError as error:
            raise self._lost(worker, channel, str(error)) from error

    def _receive(
        self, worker: int, share: WorkerShare, layer: int, step: int, out: Tensor, heads: HeadShape
    ) -> tuple[Tensor, Tensor | None]:
        """Receives outputs and partials of a worker's rows. If the rows are consecutive, outputs
        are received in place, as a slice of `out`."""
        if isinstance(share.outputs, slice):
            whole = out[share.outputs]
        else:
            whole = out.new_empty(share.num_whole, out.shape[1])
        part = None
        targets = [whole] if share.num_whole else []
        if share.num_partials:
            part = torch.empty(share.num_partials, heads.num_heads, heads.value_dim + 2)
            targets.append(part)
        channel = self._channel(worker)
        try:
            only = targets[0] if len(targets) == 1 else None
            header = _receive_header(channel, layer, step, only)
            if header.kind != ATTENDED or header.num_bytes != sum(t.nbytes for t in targets):
                raise AttentionChannelError("its message does not match the step")
            self.attending_ns += header.busy_ns
            if only is None:
                for target in targets:
                    channel.receive_into(target)
        except AttentionChannelError as error:
            raise self._lost(worker, channel, str(error)) from error
        return whole, part

    def _lost(self, worker: int, channel: AttentionChannel, why: str) -> AttentionLostError:
        channel.close()
        if self._channels[worker] is channel:  # otherwise the channel was replaced already
            self._channels[worker] = None
        self.on_lost(worker, channel)
        return self._lost_error(worker, why)

    def _lost_error(self, worker: int, why: str) -> AttentionLostError:
        """Makes the error. If the workers share the heads, arena 0 stands for all of them, like in
        `Partition.arena_of`: no block is complete without each worker."""
        return AttentionLostError(worker, 0 if self._head_ranges else worker, why)


def _receive_header(
    channel: AttentionChannel, layer: int, step: int, target: Tensor | None
) -> Header:
    """Receives the header of a layer's result, and its payload into `target` if the sizes are
    equal. Skips results of steps that were dropped. Raises AttentionChannelError with the worker's
    text if the step failed there."""
    header = channel.receive(target)
    while header.kind == ATTENDED and (header.step, header.layer) != (step, layer):
        if target is None or header.num_bytes != target.nbytes:
            channel.receive_into(memoryview(bytearray(header.num_bytes)))
        header = channel.receive(target)
    if header.kind == FAILED and header.num_bytes <= MAX_TEXT_BYTES:
        text = bytearray(header.num_bytes)
        if target is not None and header.num_bytes == target.nbytes:
            text[:] = view_of(target)
        else:
            channel.receive_into(memoryview(text))
        raise AttentionChannelError(text.decode(errors="replace"))
    return header
