"""The attention worker's side of a step: stores K and V, attends, answers. One thread per port.

Owns nothing but the steps under way; the blocks belong to the arena, and who may write which is the
model worker's to know. Between rings, and with native kernels, the messages of layers are served in
C++ (`engine.native.hand`) and only the others come here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from moonpool.attention.port import CHECK_S, Port, PortError, RingPort
from moonpool.attention.wire import (
    ATTENDED,
    ECHO,
    FAILED,
    KEYS_VALUES,
    MAX_ECHO_BYTES,
    MAX_PLAN_BYTES,
    MAX_TEXT_BYTES,
    PLAN,
    Header,
    Plan,
    Q,
)
from moonpool.engine.native.hand import OTHER, REFUSED, WAITED, NativeHand, NativeStep
from moonpool.engine.native.split import NativeSplitOps
from moonpool.engine.ops import HeadShape, KvCache, SplitOps, StepMeta

KEPT_STEPS = 4
"""Steps a model worker may have under way; older ones were given up."""


@dataclass(slots=True)
class HandStep:
    """One worker's share of a step, as its plan says. `q`: the layer's queries."""

    stores: StepMeta
    whole: StepMeta
    parts: StepMeta
    segments: Tensor
    part_rows: Tensor
    num_queries: int
    early: bool
    q: Tensor | None = None
    state: Tensor | None = None
    busy_ns: int = 0


class Hand:
    """Attends for one model worker. `writing` hears of the blocks that a step is about to
    write, and of its epoch."""

    def __init__(
        self,
        ops: SplitOps,
        cache: KvCache,
        heads: HeadShape,
        scale: float,
        writing: Callable[[Iterable[int], int], None],
    ) -> None:
        self._ops = ops
        self._cache = cache
        self._heads = heads
        self._scale = scale
        self._writing = writing
        self._dtype = cache.blocks.dtype
        self._steps: dict[int, HandStep] = {}
        self._plans = msgspec.msgpack.Decoder(Plan)
        self._native: NativeHand | None = None

    def serve(self, port: Port) -> None:
        """Until the other side is gone: PortError. What it asks in error it is told."""
        if isinstance(port, RingPort) and isinstance(self._ops, NativeSplitOps):
            ends = port.inward, port.outward, port.capacity
            self._native = NativeHand(
                self._ops, self._cache, self._heads, self._scale, ends, port.waiter, KEPT_STEPS
            )
        with torch.inference_mode():
            while True:
                header = self._next(port)
                try:
                    if header is None:
                        raise IndexError("a row's position or context lies outside its block table")
                    self._take(port, header)
                except PortError:
                    raise
                except Exception as error:  # the model worker hears of it, and goes on without us
                    text = f"{type(error).__name__}: {error}".encode()[:MAX_TEXT_BYTES]
                    port.send(Header(len(text), FAILED, 0, 0), _bytes(text))
                    raise PortError(f"gave up on a step: {error}") from error

    def _next(self, port: Port) -> Header | None:
        """Of a message that is for us; None if a step was refused."""
        native = self._native
        if native is None:
            return port.receive()
        assert isinstance(port, RingPort)
        while True:
            found = native.serve(int(CHECK_S * 1e9))
            if found == OTHER:
                head = native.header
                return Header(head.num_bytes, head.kind, head.layer, head.step)
            if found == REFUSED:
                return None
            if found != WAITED:
                raise PortError("the other side's ring makes no sense")
            port.live()

    def _take(self, port: Port, header: Header) -> None:
        if header.kind == PLAN:
            self._begin(port, header)
        elif header.kind == Q:
            self._take_queries(port, header)
        elif header.kind == KEYS_VALUES:
            self._attend(port, header)
        elif header.kind == ECHO and header.num_bytes <= MAX_ECHO_BYTES:
            payload = memoryview(bytearray(header.num_bytes))
            port.receive_into(payload)
            port.send(header, payload)
        else:
            raise ValueError(f"message of the unknown kind {header.kind}")

    def _begin(self, port: Port, header: Header) -> None:
        if header.num_bytes > MAX_PLAN_BYTES:
            raise ValueError(f"a plan of {header.num_bytes} bytes")
        data = bytearray(header.num_bytes)
        port.receive_into(memoryview(data))
        step = self.begin(self._plans.decode(data))
        while len(self._steps) >= KEPT_STEPS:
            del self._steps[next(iter(self._steps))]
        self._steps[header.step] = step
        if self._native is not None:
            self._native.begin(
                NativeStep(
                    header.step, step.stores, step.whole, step.parts, step.segments, step.part_rows,
                    step.num_queries, step.early,
                )
            )  # fmt: skip

    def begin(self, plan: Plan) -> HandStep:
        """Raises ValueError for a plan that contradicts itself."""
        step = HandStep(
            stores=plan.stores.meta(),
            whole=plan.whole.meta(),
            parts=plan.parts.meta(),
            segments=_int32(plan.segments),
            part_rows=_int32(plan.part_rows).long(),
            num_queries=plan.num_queries,
            early=plan.early,
        )
        if step.whole.num_rows > step.num_queries or len(step.part_rows) != step.parts.num_rows:
            raise ValueError("a plan whose rows do not fit each other")
        self._writing(_written(step.stores, self._cache.layout.block_tokens), plan.epoch)
        return step

    def _take_queries(self, port: Port, header: Header) -> None:
        step, heads = self._steps[header.step], self._heads
        q = self._receive(port, header, (step.num_queries, heads.num_heads, heads.head_dim))
        began_ns = time.perf_counter_ns()
        step.q, step.state = q, None
        whole = step.whole
        if whole.num_rows and step.early:
            own = q[: whole.num_rows]
            step.state = self._ops.attend_old(
                own, heads, self._cache, header.layer, whole, self._scale
            )
        step.busy_ns = time.perf_counter_ns() - began_ns

    def _attend(self, port: Port, header: Header) -> None:
        step, heads, layer = self._steps[header.step], self._heads, header.layer
        shape = (step.stores.num_rows, 2 * heads.num_kv_heads, heads.head_dim)
        kv = self._receive(port, header, shape)
        if step.q is None:
            raise ValueError("keys and values without queries")
        began_ns = time.perf_counter_ns()
        self.store(step, kv, layer)
        answers = self.attend(step, step.q, layer)
        busy_ns = step.busy_ns + time.perf_counter_ns() - began_ns
        num_bytes = sum(answer.nbytes for answer in answers)
        port.send(Header(num_bytes, ATTENDED, layer, header.step, busy_ns % (1 << 32)), *answers)

    def store(self, step: HandStep, kv: Tensor, layer: int) -> None:
        if step.stores.num_rows:
            self._ops.store(kv, self._heads, self._cache, layer, step.stores)

    def attend(self, step: HandStep, q: Tensor, layer: int) -> list[Tensor]:
        """With K and V stored. Outputs of the sequences that lie here, then partials of those that
        lie here in part; what a step has none of is left out."""
        ops, heads, cache, scale = self._ops, self._heads, self._cache, self._scale
        answers: list[Tensor] = []
        own = q[: step.whole.num_rows]
        if step.state is not None:
            answers.append(ops.attend_new(own, step.state, heads, cache, layer, step.whole, scale))
        elif step.whole.num_rows:
            answers.append(ops.attend(own, heads, cache, layer, step.whole, scale))
        if step.parts.num_rows:
            rows = q[step.part_rows]
            answers.append(
                ops.attend_segments(rows, heads, cache, layer, step.parts, scale, step.segments)
            )
        return answers

    def _receive(self, port: Port, header: Header, shape: tuple[int, int, int]) -> Tensor:
        rows = torch.empty(shape, dtype=self._dtype)
        if rows.nbytes != header.num_bytes:
            raise ValueError(f"{header.num_bytes} bytes came where {rows.nbytes} are due")
        port.receive_into(rows)
        return rows


def _bytes(text: bytes) -> memoryview:
    return memoryview(bytearray(text))


def _int32(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.int32) if data else _NONE


_NONE = torch.zeros(0, dtype=torch.int32)


def _written(rows: StepMeta, block_tokens: int) -> Iterable[int]:
    """Blocks in which a row will be stored."""
    starts = rows.row_starts.tolist()
    for s, context in enumerate(rows.context_starts.tolist()):
        count = starts[s + 1] - starts[s]
        blocks = slice(context // block_tokens, -(-(context + count) // block_tokens))
        yield from rows.block_tables[s, blocks].tolist()
