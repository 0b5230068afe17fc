"""`Ops` whose attention is done elsewhere: the dense operations are the local ones, the KVCache
lies at attention workers. Model code does not notice.

`rope_store` sends q, so that attention over the old tokens may begin, then k and v; `attend` takes
what comes back. Rows do not see each other, and a split sequence is merged in the order of its
tokens, so the bits are those of the local operations.
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

from moonpool.attention.hand import Hand, HandStep
from moonpool.attention.partition import HeadRange
from moonpool.attention.plan import Placement, Share, StepShares, for_all, split_step
from moonpool.attention.port import Payload, Port, PortError, view_of
from moonpool.attention.wire import (
    ATTENDED,
    FAILED,
    KEYS_VALUES,
    MAX_TEXT_BYTES,
    PLAN,
    Header,
    Q,
)
from moonpool.engine.ops import (
    HeadShape,
    KvCache,
    QkNorm,
    RopeTable,
    SplitOps,
    StepMeta,
)

MAX_STEP = 1 << 32
KEPT_STEPS = 2
"""Steps that may be under way together: batches that take turns."""


class AttentionLostError(RuntimeError):
    """An attention worker failed; `worker` is its number."""

    def __init__(self, worker: int, why: str) -> None:
        super().__init__(f"attention worker {worker}: {why}")
        self.worker = worker


class Home(NamedTuple):
    """What this process keeps itself, as the last of the workers."""

    worker: int
    hand: Hand


@dataclass(slots=True)
class _Step:
    meta: StepMeta
    number: int
    shares: StepShares
    at_home: HandStep | None = None


class RemoteOps:
    """`ports[w]` leads to the worker that has the w-th range of blocks, None while it is lost; or,
    with `head_ranges`, to the one that has those heads of all blocks; at `home` no port does.
    Used by one thread; `replace` may come from others. `numbers` are for its steps: one for all who
    use the same ports."""

    def __init__(
        self,
        local: SplitOps,
        ports: Sequence[Port | None],
        placement: Placement,
        early_query: bool = True,
        head_ranges: Sequence[HeadRange] = (),
        numbers: Iterator[int] | None = None,
        home: Home | None = None,
    ) -> None:
        crew = f"{len(ports)}{'' if home is None else ' with its own'}"
        self.name = f"{local.name}, {crew} attention workers"
        self.arithmetic = local.arithmetic
        self.inner = local.inner
        self.device = local.device
        self.linear = local.linear
        self.rms_norm = local.rms_norm
        self.add_rms_norm = local.add_rms_norm
        self.silu_mul = local.silu_mul
        self._local = local
        self._ports = list(ports)
        self._placement = placement
        self._head_ranges = tuple(head_ranges)
        self.on_lost: Callable[[int, Port], None] = lambda worker, port: None
        self.epoch = 0  # of the steps to come; set by whoever begins them
        self.attending_ns = 0  # what the workers said they took, and
        self.waited_ns = 0  # what was waited for their answers, in all
        self._early_query = early_query
        self._home = home
        self._home_worker = -1 if home is None else home.worker
        self._steps: list[_Step] = []
        self._numbers = itertools.count(1) if numbers is None else numbers
        self._plans = msgspec.msgpack.Encoder()

    @property
    def num_workers(self) -> int:
        return len(self._ports)

    def replace(self, worker: int, port: Port | None) -> None:
        """A worker was lost, or another one has taken its place."""
        former, self._ports[worker] = self._ports[worker], port
        if former is not None:
            former.close()

    def rope_store(
        self,
        qkv: Tensor,
        heads: HeadShape,
        rope: RopeTable,
        qk_norm: QkNorm | None,
        cache: KvCache,
        layer: int,
        meta: StepMeta,
    ) -> Tensor:
        step = self._step_of(meta, cache)
        q, kv = self._local.rope(qkv, heads, rope, qk_norm, meta)
        away = [(w, share) for w, share in step.shares.shares.items() if w != self._home_worker]
        for worker, share in away:
            rows = q[share.queries]
            if self._head_ranges:
                rows = self._head_ranges[worker].of_queries(q, heads)
            self._send(worker, Q, layer, step.number, rows.contiguous())
        for worker, share in away:
            rows = kv[share.stores]
            if self._head_ranges:
                rows = self._head_ranges[worker].of_keys_values(kv)
            self._send(worker, KEYS_VALUES, layer, step.number, rows.contiguous())
        if self._home is not None and step.at_home is not None:
            share = step.shares.shares[self._home.worker]
            self._home.hand.store(step.at_home, kv[share.stores].contiguous(), layer)
        return q

    def attend(
        self,
        q: Tensor,
        heads: HeadShape,
        cache: KvCache,
        layer: int,
        meta: StepMeta,
        scale: float,
    ) -> Tensor:
        step = self._step_of(meta, cache)
        width = heads.num_heads * heads.head_dim
        out = torch.empty(meta.num_rows, width, dtype=q.dtype)
        own_partials = self._attend_at_home(step, q, layer, out)
        began_ns = time.perf_counter_ns()
        partials: list[Tensor] = []
        for worker, share in step.shares.shares.items():
            if worker == self._home_worker:
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
            everything = torch.cat([*partials, *own_partials])
            out[merge.rows] = self._local.merge(everything, merge.order, merge.starts, out.dtype)
        return out

    def _attend_at_home(self, step: _Step, q: Tensor, layer: int, out: Tensor) -> list[Tensor]:
        """What lies here, while the workers are at theirs: outputs go to `out`, partials are
        returned."""
        if self._home is None or step.at_home is None:
            return []
        share = step.shares.shares[self._home.worker]
        answers = self._home.hand.attend(step.at_home, q[share.queries].contiguous(), layer)
        if share.num_whole:
            out[share.outputs] = answers.pop(0)
        return answers

    def _step_of(self, meta: StepMeta, cache: KvCache) -> _Step:
        """Of one or two steps under way; a new one is announced to those who have a share."""
        for step in self._steps:
            if step.meta is meta:
                return step
        shares = split_step(meta, self._placement, cache.layout.block_tokens, self.epoch)
        if self._head_ranges:
            shares = for_all(shares, len(self._head_ranges))
        step = _Step(meta, next(self._numbers) % MAX_STEP, shares)
        for worker, share in shares.shares.items():
            plan = share.plan
            if self._home is not None and worker == self._home.worker:
                step.at_home = self._home.hand.begin(plan)
                continue
            if not self._early_query:
                plan = msgspec.structs.replace(plan, early=False)
            body = bytearray(self._plans.encode(plan))
            self._send(worker, PLAN, 0, step.number, memoryview(body))
        self._steps = [*self._steps[-KEPT_STEPS + 1 :], step]
        return step

    def _port(self, worker: int) -> Port:
        port = self._ports[worker]
        if port is None:
            raise AttentionLostError(worker, "it is lost")
        return port

    def _send(self, worker: int, kind: int, layer: int, step: int, payload: Payload) -> None:
        port = self._port(worker)
        try:
            port.send(Header(payload.nbytes, kind, layer, step), payload)
        except PortError as error:
            raise self._lost(worker, port, str(error)) from error

    def _receive(
        self, worker: int, share: Share, layer: int, step: int, out: Tensor, heads: HeadShape
    ) -> tuple[Tensor, Tensor | None]:
        """Outputs and partials of a worker's rows; if it has all of them, in order, outputs go
        straight to `out`."""
        if isinstance(share.outputs, slice):
            whole = out[share.outputs]
        else:
            whole = out.new_empty(share.num_whole, out.shape[1])
        part = None
        targets = [whole] if share.num_whole else []
        if share.num_partials:
            part = torch.empty(share.num_partials, heads.num_heads, heads.head_dim + 2)
            targets.append(part)
        port = self._port(worker)
        try:
            only = targets[0] if len(targets) == 1 else None
            header = port.receive(only)
            while header.kind == ATTENDED and (header.step, header.layer) != (step, layer):
                if only is None or header.num_bytes != only.nbytes:
                    port.receive_into(memoryview(bytearray(header.num_bytes)))
                header = port.receive(only)  # nobody wanted that one
            taken = only is not None and header.num_bytes == only.nbytes
            if header.kind == FAILED and header.num_bytes <= MAX_TEXT_BYTES:
                text = bytearray(header.num_bytes)
                if taken:
                    assert only is not None
                    text[:] = view_of(only)
                else:
                    port.receive_into(memoryview(text))
                raise PortError(text.decode(errors="replace"))
            if header.kind != ATTENDED or header.num_bytes != sum(t.nbytes for t in targets):
                raise PortError("it answered what was not asked")
            self.attending_ns += header.busy_ns
            if taken:
                targets = []
            for target in targets:
                port.receive_into(target)
        except PortError as error:
            raise self._lost(worker, port, str(error)) from error
        return whole, part

    def _lost(self, worker: int, port: Port, why: str) -> AttentionLostError:
        port.close()
        if self._ports[worker] is port:  # else there is another one already
            self._ports[worker] = None
        self.on_lost(worker, port)
        return AttentionLostError(worker, why)
