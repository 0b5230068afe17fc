"""An attention worker's side of steps in C++ (attention_step.cpp), without Python between layers.

The C++ loop reads queries, keys and values from one ring, computes attention, and writes the result
to another ring. This module fills the structs that the C++ code reads, and keeps their tensors
alive. A step's structs describe layer 0; the C++ side moves their addresses on to the other layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moonpool_engine.engine.native.library import ATTEND_CALL, PART_TAIL, STATE_FLOATS, STORE_CALL
from moonpool_engine.engine.native.shared_memory import Waiter, open_rings
from moonpool_engine.engine.native.split import NativeSplitOps
from moonpool_engine.engine.ops import (
    SEGMENT,
    AttendArgs,
    AttendRule,
    HeadShape,
    KvCache,
    StepMeta,
    compute_dtype,
)

WAITED, OTHER, REFUSED = range(3)
ECHO_BYTES = 1 << 16
_PART_BYTES = ATTEND_CALL.size + PART_TAIL.size
_POINTER, _INT64 = ctypes.c_void_p, ctypes.c_int64
_Part = ctypes.c_char * _PART_BYTES


class RingHeader(ctypes.Structure):
    """The message header, as in ring.h and moonpool_engine/attention_offload/wire.py."""

    _fields_ = (
        ("num_bytes", ctypes.c_uint32),
        ("kind", ctypes.c_uint8),
        ("unused", ctypes.c_uint8),
        ("layer", ctypes.c_uint16),
        ("step", ctypes.c_uint32),
        ("busy_ns", ctypes.c_uint32),
    )


class _ExecutorStepStruct(ctypes.Structure):
    _fields_ = (
        *((name, _INT64) for name in ("number", "stores", "whole", "parts", "early", "layer")),
        *((name, _INT64) for name in ("q_bytes", "kv_bytes", "answer_bytes", "row_bytes")),
        *((name, _POINTER) for name in ("q", "kv", "answer", "part_q", "part_rows")),
        ("store", ctypes.c_char * STORE_CALL.size),
        *((name, _Part) for name in ("all", "before", "after", "segments")),
    )


class _LayerRule(ctypes.Structure):
    _fields_ = (("sinks", _POINTER), ("window", _INT64), ("soft_cap", ctypes.c_float))


class _ExecutorStruct(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("inward", "outward")),
        ("capacity", _INT64),
        *((name, _POINTER) for name in ("waiter", "store", "attend")),
        *((name, _INT64) for name in ("threads", "layer_bytes", "num_layers")),
        ("steps", _POINTER),
        ("num_steps", _INT64),
        ("echo", _POINTER),
        ("echo_bytes", _INT64),
        ("rules", _POINTER),
        *((name, _INT64) for name in ("phase", "done", "busy_ns")),
        ("body", _POINTER),
        ("body_size", _INT64),
        ("step", _POINTER),
        ("header", RingHeader),
    )


@dataclass(frozen=True, slots=True)
class NativeExecutorStep:
    """One step of an attention worker.

    `stores` are the rows whose K and V the worker writes. `whole` are the sequences that lie
    completely at this worker, `parts` those with only some segments here. `part_rows`: int64, the
    row of Q for each row of `parts`. `early`: whether attention over old tokens starts before K and
    V arrive.
    """

    number: int
    stores: StepMeta
    whole: StepMeta
    parts: StepMeta
    segments: Tensor
    part_rows: Tensor
    num_queries: int
    early: bool


class NativeAttentionExecutor:
    """The native executor of one connection. Used by one thread; the rings must outlive it."""

    def __init__(
        self,
        ops: NativeSplitOps,
        cache: KvCache,
        heads: HeadShape,
        scale: float,
        ends: tuple[int, int, int],
        waiter: Waiter,
        kept_steps: int,
        rules: Sequence[AttendRule] = (),
    ) -> None:
        """`ends`: the addresses of the ring to read and of the ring to write, and their capacities
        in bytes. `rules`: the rules of each layer, or none."""
        rings = open_rings()
        assert rings is not None, "NativeSplitOps implies that the kernels are built"
        assert rings.executor_size(0) == ctypes.sizeof(_ExecutorStruct), (
            "the struct must match attention_step.cpp"
        )
        assert rings.executor_size(1) == ctypes.sizeof(_ExecutorStepStruct), (
            "the struct must match attention_step.cpp"
        )
        self._serve = rings.serve
        self._ops, self._cache, self._heads, self._scale = ops, cache, heads, scale
        self._steps = (_ExecutorStepStruct * kept_steps)()
        self._held: list[tuple[object, ...]] = [()] * kept_steps
        self._next = 0
        self._echo = ctypes.create_string_buffer(ECHO_BYTES)
        self._waiter = waiter
        inward, outward, capacity = ends
        store, attend = ops.addresses(compute_dtype(cache.layout))
        self._rules = _packed(rules, cache.layout.num_layers)
        self._sinks = [rule.sinks for rule in rules]  # the sinks must outlive the struct
        self._struct = _ExecutorStruct(
            inward=inward,
            outward=outward,
            capacity=capacity,
            waiter=ctypes.addressof(waiter),
            store=store,
            attend=attend,
            threads=torch.get_num_threads(),
            layer_bytes=cache.blocks.stride(1) * cache.blocks.element_size(),
            num_layers=cache.layout.num_layers,
            steps=ctypes.addressof(self._steps),
            num_steps=kept_steps,
            echo=ctypes.addressof(self._echo),
            echo_bytes=ECHO_BYTES,
            rules=ctypes.addressof(self._rules) if rules else None,
        )
        for step in self._steps:
            step.number = -1

    @property
    def header(self) -> RingHeader:
        """The header of the message that `serve` left to the caller or refused."""
        header: RingHeader = self._struct.header
        return header

    def serve(self, timeout_ns: int) -> int:
        """Serves steps for at most `timeout_ns` of silence.

        Returns WAITED after that time, OTHER if the next message is for the caller, REFUSED if a
        kernel refused a step, and a negative number if the ring is corrupt.
        """
        return self._serve(ctypes.addressof(self._struct), timeout_ns)

    def begin(self, plan: NativeExecutorStep) -> None:
        """Prepares a step in place of the oldest one. Raises ValueError if shapes do not fit."""
        heads, dtype = self._heads, compute_dtype(self._cache.layout)
        num_parts = plan.parts.num_rows
        width = heads.num_heads * heads.head_dim
        q = torch.empty(plan.num_queries, width, dtype=dtype)
        kv = torch.empty(plan.stores.num_rows, heads.stored_heads, heads.head_dim, dtype=dtype)
        part_q = torch.empty(num_parts, width, dtype=dtype)
        out_bytes = plan.whole.num_rows * heads.num_heads * heads.value_dim * q.element_size()
        partial_floats = num_parts * heads.num_heads * (heads.value_dim + 2)
        answer = torch.empty(out_bytes + 4 * partial_floats, dtype=torch.uint8)
        if num_parts and not 0 <= int(plan.part_rows.min()) <= int(plan.part_rows.max()) < len(q):
            raise ValueError("the plan names rows of Q that are not sent")
        step = self._steps[self._next]
        step.number = plan.number
        step.stores, step.whole, step.parts = len(kv), plan.whole.num_rows, num_parts
        step.early, step.layer = plan.early, -1
        step.q_bytes, step.kv_bytes, step.answer_bytes = q.nbytes, kv.nbytes, answer.nbytes
        step.row_bytes = width * q.element_size()
        step.q, step.kv, step.answer = q.data_ptr(), kv.data_ptr(), answer.data_ptr()
        step.part_q, step.part_rows = part_q.data_ptr(), plan.part_rows.data_ptr()
        if len(kv):
            call = self._ops.store_call(kv, self._args(plan.stores))
            ctypes.memmove(_at(step, "store"), call, len(call))
        partials = answer.data_ptr() + out_bytes
        held = self._attend_calls(step, plan, (q, part_q), (answer.data_ptr(), partials))
        self._held[self._next] = (plan, q, kv, answer, part_q, *held)
        self._next = (self._next + 1) % len(self._steps)

    def _args(self, meta: StepMeta) -> AttendArgs:
        """Layer 0's: the C++ side moves the blocks' address on to each layer, and adds its rule."""
        return AttendArgs(self._heads, self._cache, 0, meta, self._scale)

    def _attend_calls(
        self,
        step: _ExecutorStepStruct,
        plan: NativeExecutorStep,
        qs: tuple[Tensor, Tensor],
        to: tuple[int, int],
    ) -> tuple[Tensor, ...]:
        """Fills the step's attention calls; returns the tensors that must outlive the step."""
        heads, whole = self._heads, plan.whole
        size = STATE_FLOATS + 2 * heads.value_dim
        state = torch.empty(whole.num_rows, heads.num_heads, size)
        starts = self._ops.starts_of(whole)
        begins = (plan.segments * SEGMENT).contiguous()
        ends = begins + SEGMENT
        at, kept = starts.data_ptr(), state.data_ptr()
        if whole.num_rows:
            own = qs[0][: whole.num_rows]
            self._put(step, "all", own, to[0], whole, (0, 0, 0, 0, 0))
            self._put(step, "before", own, 0, whole, (0, at, 0, kept, 0))
            self._put(step, "after", own, to[0], whole, (at, 0, kept, 0, 0))
        if plan.parts.num_rows:
            tail = (begins.data_ptr(), ends.data_ptr(), 0, 0, to[1])
            self._put(step, "segments", qs[1], 0, plan.parts, tail)
        return state, starts, begins, ends

    def _put(
        self,
        step: _ExecutorStepStruct,
        name: str,
        q: Tensor,
        out: int,
        meta: StepMeta,
        tail: tuple[int, ...],
    ) -> None:
        call = self._ops.part_call(q, out, self._args(meta))
        call += PART_TAIL.pack(*tail)
        ctypes.memmove(_at(step, name), call, len(call))


def _packed(rules: Sequence[AttendRule], num_layers: int) -> ctypes.Array[_LayerRule]:
    """Returns the rules in the form in which attention_step.cpp reads them. Raises ValueError if
    some layers have none."""
    if rules and len(rules) != num_layers:
        raise ValueError(f"{len(rules)} rules of attention for {num_layers} layers")
    packed = (_LayerRule * len(rules))()
    for at, rule in zip(packed, rules, strict=True):
        at.sinks = None if rule.sinks is None else rule.sinks.data_ptr()
        at.window, at.soft_cap = rule.window, rule.soft_cap
    return packed


def _at(step: _ExecutorStepStruct, name: str) -> int:
    offset: int = getattr(_ExecutorStepStruct, name).offset
    return ctypes.addressof(step) + offset
