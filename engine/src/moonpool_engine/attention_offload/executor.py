"""The attention worker's side of a step: stores K and V, attends, and returns the results.

One thread serves one channel. The executor owns only the steps under way. The blocks belong to the
arena, and the model worker decides which of them are written. Over rings and with native kernels,
C++ code serves the messages of layers (engine/native/attention_executor.py), and only other
messages reach this module.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from moonpool_engine.attention_offload.channel import (
    CHECK_S,
    AttentionChannel,
    AttentionChannelError,
    RingChannel,
)
from moonpool_engine.attention_offload.wire import (
    ATTENDED,
    ECHO,
    FAILED,
    KEYS_VALUES,
    MAX_ECHO_BYTES,
    MAX_PLAN_BYTES,
    MAX_TEXT_BYTES,
    PLAN,
    Header,
    Q,
    StepPlan,
)
from moonpool_engine.engine.native.attention_executor import (
    OTHER,
    REFUSED,
    WAITED,
    NativeAttentionExecutor,
    NativeExecutorStep,
)
from moonpool_engine.engine.native.split import NativeSplitOps
from moonpool_engine.engine.ops import (
    PLAIN,
    AttendArgs,
    AttendRule,
    HeadShape,
    KvCache,
    SplitOps,
    StepMeta,
    compute_dtype,
)

MAX_STEPS = 4
"""Steps a model worker may have under way; older ones are dropped."""


@dataclass(slots=True)
class ExecutorStep:
    """One worker's share of a step, unpacked from its `StepPlan`."""

    stores: StepMeta
    whole: StepMeta
    parts: StepMeta
    segments: Tensor
    part_rows: Tensor
    num_queries: int
    early: bool
    q: Tensor | None = None  # the layer's queries, [num_queries, num_heads, head_dim]
    state: Tensor | None = None  # state of `attend_old`, for `attend_new` of the same layer
    busy_ns: int = 0  # time spent on the present layer so far


class AttentionExecutor:
    """Attends for one model worker."""

    def __init__(
        self,
        ops: SplitOps,
        cache: KvCache,
        heads: HeadShape,
        scale: float,
        on_write: Callable[[Iterable[int], int], None],
        rules: Sequence[AttendRule] = (),
    ) -> None:
        """`on_write(block_ids, epoch)` is called before a step writes these blocks. `rules`: the
        rules of each layer, or none."""
        self._ops = ops
        self._cache = cache
        self._heads = heads
        self._scale = scale
        self._on_write = on_write
        self._rules = tuple(rules)
        self._dtype = compute_dtype(cache.layout)
        self._steps: dict[int, ExecutorStep] = {}
        self._plans = msgspec.msgpack.Decoder(StepPlan)
        self._native: NativeAttentionExecutor | None = None

    def serve(self, channel: AttentionChannel) -> None:
        """Serves steps until the peer is gone, then raises AttentionChannelError. An invalid step
        is reported to the peer first (FAILED)."""
        if isinstance(channel, RingChannel) and isinstance(self._ops, NativeSplitOps):
            ends = channel.inward, channel.outward, channel.capacity
            self._native = NativeAttentionExecutor(
                self._ops, self._cache, self._heads, self._scale, ends, channel.waiter, MAX_STEPS,
                self._rules,
            )  # fmt: skip
        with torch.inference_mode():
            while True:
                header = self._next(channel)
                try:
                    if header is None:
                        raise IndexError("a row's position or context lies outside its block table")
                    self._handle(channel, header)
                except AttentionChannelError:
                    raise
                except Exception as error:  # reported: the model worker continues without this one
                    text = f"{type(error).__name__}: {error}".encode()[:MAX_TEXT_BYTES]
                    channel.send(Header(len(text), FAILED, 0, 0), _bytes(text))
                    raise AttentionChannelError(f"a step failed: {error}") from error

    def _next(self, channel: AttentionChannel) -> Header | None:
        """Returns the header of the next message that C++ does not serve, or None if C++ refused a
        step."""
        native = self._native
        if native is None:
            return channel.receive()
        assert isinstance(channel, RingChannel)
        while True:
            found = native.serve(int(CHECK_S * 1e9))
            if found == OTHER:
                head = native.header
                return Header(head.num_bytes, head.kind, head.layer, head.step)
            if found == REFUSED:
                return None
            if found != WAITED:
                raise AttentionChannelError("the peer's ring is corrupt")
            channel.check_peer()

    def _handle(self, channel: AttentionChannel, header: Header) -> None:
        if header.kind == PLAN:
            self._begin_step(channel, header)
        elif header.kind == Q:
            self._receive_queries(channel, header)
        elif header.kind == KEYS_VALUES:
            self._attend(channel, header)
        elif header.kind == ECHO and header.num_bytes <= MAX_ECHO_BYTES:
            payload = memoryview(bytearray(header.num_bytes))
            channel.receive_into(payload)
            channel.send(header, payload)
        else:
            raise ValueError(f"a message of the unknown kind {header.kind}")

    def _begin_step(self, channel: AttentionChannel, header: Header) -> None:
        if header.num_bytes > MAX_PLAN_BYTES:
            raise ValueError(f"a plan of {header.num_bytes} bytes is too large")
        data = bytearray(header.num_bytes)
        channel.receive_into(memoryview(data))
        step = self.begin(self._plans.decode(data))
        while len(self._steps) >= MAX_STEPS:
            del self._steps[next(iter(self._steps))]
        self._steps[header.step] = step
        if self._native is not None:
            self._native.begin(
                NativeExecutorStep(
                    header.step, step.stores, step.whole, step.parts, step.segments, step.part_rows,
                    step.num_queries, step.early,
                )
            )  # fmt: skip

    def begin(self, plan: StepPlan) -> ExecutorStep:
        """Unpacks a plan. Raises ValueError if it is inconsistent."""
        step = ExecutorStep(
            stores=plan.stores.meta(),
            whole=plan.whole.meta(),
            parts=plan.parts.meta(),
            segments=_int32(plan.segments),
            part_rows=_int32(plan.part_rows).long(),
            num_queries=plan.num_queries,
            early=plan.early,
        )
        if step.whole.num_rows > step.num_queries or len(step.part_rows) != step.parts.num_rows:
            raise ValueError("the rows of the plan do not fit each other")
        self._on_write(_written(step.stores, self._cache.layout.block_tokens), plan.epoch)
        return step

    def _receive_queries(self, channel: AttentionChannel, header: Header) -> None:
        step, heads = self._steps[header.step], self._heads
        q = self._receive(channel, header, (step.num_queries, heads.num_heads, heads.head_dim))
        began_ns = time.perf_counter_ns()
        step.q, step.state = q, None
        whole = step.whole
        if whole.num_rows and step.early:
            whole_q = q[: whole.num_rows]
            step.state = self._ops.attend_old(whole_q, self._args(header.layer, whole))
        step.busy_ns = time.perf_counter_ns() - began_ns

    def _attend(self, channel: AttentionChannel, header: Header) -> None:
        step, heads, layer = self._steps[header.step], self._heads, header.layer
        shape = (step.stores.num_rows, heads.stored_heads, heads.head_dim)
        kv = self._receive(channel, header, shape)
        if step.q is None:
            raise ValueError("keys and values came before queries")
        began_ns = time.perf_counter_ns()
        self.store(step, kv, layer)
        results = self.attend(step, step.q, layer)
        busy_ns = step.busy_ns + time.perf_counter_ns() - began_ns
        num_bytes = sum(result.nbytes for result in results)
        channel.send(Header(num_bytes, ATTENDED, layer, header.step, busy_ns % (1 << 32)), *results)

    def store(self, step: ExecutorStep, kv: Tensor, layer: int) -> None:
        """kv: [stored rows, stored_heads, head_dim], K heads first."""
        if step.stores.num_rows:
            self._ops.store(kv, self._args(layer, step.stores))

    def attend(self, step: ExecutorStep, q: Tensor, layer: int) -> list[Tensor]:
        """Attends for one layer whose K and V are stored. q: [num_queries, num_heads, head_dim].

        Returns the outputs of whole sequences, [rows, num_heads * value_dim], then the partials of
        split ones, [rows, num_heads, value_dim + 2]; either is left out if there are none.
        """
        ops, whole = self._ops, self._args(layer, step.whole)
        results: list[Tensor] = []
        whole_q = q[: step.whole.num_rows]
        if step.state is not None:
            results.append(ops.attend_new(whole_q, step.state, whole))
        elif step.whole.num_rows:
            results.append(ops.attend(whole_q, whole))
        if step.parts.num_rows:
            rows = q[step.part_rows]
            parts = self._args(layer, step.parts)
            results.append(ops.attend_segments(rows, step.segments, parts))
        return results

    def _args(self, layer: int, meta: StepMeta) -> AttendArgs:
        rule = self._rules[layer] if self._rules else PLAIN
        return AttendArgs(self._heads, self._cache, layer, meta, self._scale, rule)

    def _receive(
        self, channel: AttentionChannel, header: Header, shape: tuple[int, int, int]
    ) -> Tensor:
        rows = torch.empty(shape, dtype=self._dtype)
        if rows.nbytes != header.num_bytes:
            raise ValueError(f"{header.num_bytes} bytes arrived where {rows.nbytes} were expected")
        channel.receive_into(rows)
        return rows


def _bytes(text: bytes) -> memoryview:
    return memoryview(bytearray(text))


def _int32(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.int32) if data else _NONE


_NONE = torch.zeros(0, dtype=torch.int32)


def _written(rows: StepMeta, block_tokens: int) -> Iterable[int]:
    """Blocks that these rows will be stored in."""
    starts = rows.row_starts.tolist()
    for s, context in enumerate(rows.context_starts.tolist()):
        count = starts[s + 1] - starts[s]
        blocks = slice(context // block_tokens, -(-(context + count) // block_tokens))
        yield from rows.block_tables[s, blocks].tolist()
