"""Implements `SplitOps` with the C++ kernels: the parts of an attention call, for attention
offloading.

These parts run the same kernels on the same rows as `NativeOps`, so the bits are the same.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from moonpool.config.tables import Quantization
from moonpool_engine.engine.native.library import MERGE_CALL, PART_TAIL, STATE_FLOATS, STORE_CALL
from moonpool_engine.engine.native.ops import NativeOps, queries_of, same_width
from moonpool_engine.engine.ops import (
    SEGMENT,
    SPAN,
    AttendArgs,
    HeadShape,
    QkNorm,
    RopeTable,
    StepMeta,
)


class NativeSplitOps(NativeOps):
    """`SplitOps` in C++."""

    # the state of linear attention is not divided among processes
    without = frozenset({"linear attention"})

    def __init__(self, isa: str | None = None, quantization: Quantization = "none") -> None:
        super().__init__(isa, quantization)
        self._old: tuple[StepMeta, Tensor] | None = None

    def rope(
        self,
        qkv: Tensor,
        heads: HeadShape,
        rope: RopeTable,
        qk_norm: QkNorm | None,
        meta: StepMeta,
    ) -> tuple[Tensor, Tensor]:
        """Like `SplitOps.rope`. Raises ValueError for tensors that do not fit, and IndexError for a
        position outside the angles of `rope`."""
        qkv = qkv.contiguous()
        q = torch.empty(meta.num_rows, heads.num_heads, heads.head_dim, dtype=qkv.dtype)
        kv = torch.empty(meta.num_rows, heads.stored_heads, heads.head_dim, dtype=qkv.dtype)
        where = (kv.data_ptr(), (0, 0, 0), 1, False)
        call = self._rope_call(qkv, q, heads, rope, qk_norm, meta, where)
        if self._of(qkv).rope(call, torch.get_num_threads()):
            raise IndexError("rope: a row's position lies outside the table of angles")
        return q, kv

    def store(self, kv: Tensor, args: AttendArgs) -> None:
        """Like `SplitOps.store`. Raises ValueError for K and V of another shape, and IndexError for
        a position outside its block table."""
        call = self.store_call(kv, args)
        if self._of(kv).store(call, torch.get_num_threads()):
            raise IndexError("store: a row's position lies outside its block table")

    def store_call(self, kv: Tensor, args: AttendArgs) -> bytes:
        """The packed arguments of `store`. All tensors must live until the kernel has run.

        Raises ValueError.
        """
        heads, cache, layer, meta, *_ = args
        expected = (meta.num_rows, heads.stored_heads, heads.head_dim)
        if tuple(kv.shape) != expected or not kv.is_contiguous():
            raise ValueError(f"K and V must be contiguous {list(expected)}, got {list(kv.shape)}")
        arena = self._arena_of(cache, heads, kv.dtype)
        return STORE_CALL.pack(
            kv.data_ptr(),
            arena.slice_address(layer),
            *self._step_addresses(meta),
            arena.block_bytes,
            arena.num_blocks,
            meta.block_tables.shape[1],
            meta.num_sequences,
            heads.num_kv_heads,
            heads.head_dim,
            arena.block_tokens,
            heads.latent_dim,
            arena.fp8,
        )

    def attend_old(self, q: Tensor, args: AttendArgs) -> Tensor:
        heads, meta = args.heads, args.meta
        size = STATE_FLOATS + 2 * heads.value_dim
        state = torch.empty(meta.num_rows, heads.num_heads, size, dtype=torch.float32)
        tail = PART_TAIL.pack(0, self._starts(meta).data_ptr(), 0, state.data_ptr(), 0)
        self._attend_part(q, None, args, tail)
        return state

    def attend_new(self, q: Tensor, state: Tensor, args: AttendArgs) -> Tensor:
        heads, meta = args.heads, args.meta
        out = torch.empty(meta.num_rows, heads.num_heads * heads.value_dim, dtype=q.dtype)
        tail = PART_TAIL.pack(self._starts(meta).data_ptr(), 0, state.data_ptr(), 0, 0)
        self._attend_part(q, out, args, tail)
        return out

    def attend_segments(self, q: Tensor, segments: Tensor, args: AttendArgs) -> Tensor:
        heads, meta = args.heads, args.meta
        shape = (meta.num_rows, heads.num_heads, heads.value_dim + 2)
        partials = torch.empty(shape, dtype=torch.float32)
        begins = (segments * SEGMENT).contiguous()
        ends = begins + SEGMENT
        tail = PART_TAIL.pack(begins.data_ptr(), ends.data_ptr(), 0, 0, partials.data_ptr())
        self._attend_part(q, None, args, tail)
        return partials

    def merge(
        self,
        partials: Tensor,
        order: Tensor,
        starts: Tensor,
        dtype: torch.dtype,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Like `SplitOps.merge`. Raises ValueError for tensors of another dtype or that are not
        contiguous, and IndexError for a row that names a missing partial."""
        num_partials, num_heads, size = partials.shape
        rows = starts.shape[0] - 1
        if any(x.dtype is not torch.int32 or not x.is_contiguous() for x in (order, starts)):
            raise ValueError("order and starts must be contiguous int32")
        if partials.dtype is not torch.float32 or not partials.is_contiguous():
            raise ValueError("partials must be contiguous float32")
        if rows and (int(starts[0]) != 0 or int(starts[-1]) > order.shape[0]):
            raise ValueError("starts must rise from 0 to at most the length of order")
        if sinks is not None:
            same_width(sinks, num_heads)
        out = torch.empty(rows, num_heads * (size - 2), dtype=dtype)
        call = MERGE_CALL.pack(
            partials.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            order.data_ptr(),
            starts.data_ptr(),
            out.data_ptr(),
            rows,
            num_heads,
            size - 2,
            num_partials,
        )
        if self._of(out).merge(call, 1):
            raise IndexError("merge: a row names a partial that is not there")
        return out

    def _starts(self, meta: StepMeta) -> Tensor:
        """Returns [S] int32: the start of the span with each sequence's first new row. Earlier
        spans are complete."""
        kept = self._old
        if kept is None or kept[0] is not meta:
            kept = self._old = (meta, self.starts_of(meta))
        return kept[1]

    @staticmethod
    def starts_of(meta: StepMeta) -> Tensor:
        """Returns [S] int32: the last multiple of SPAN up to each sequence's first new token."""
        return meta.context_starts // SPAN * SPAN

    def part_call(self, q: Tensor, out: int, args: AttendArgs) -> bytes:
        """The packed arguments of `attend_part` without their tail. `out`: the address of the
        output, or 0.

        All tensors must live until the kernel has run.
        """
        return self._attend_call(q, out, args)

    def addresses(self, dtype: torch.dtype) -> tuple[int, int]:
        """The addresses of the C functions for `store_call` and `part_call`."""
        kernels = self._kernels[dtype]
        store, attend = (
            ctypes.cast(call, ctypes.c_void_p).value  # type: ignore[arg-type]
            for call in (kernels.store, kernels.attend_part)
        )
        assert store is not None and attend is not None
        return store, attend

    def _attend_part(
        self,
        q: Tensor,
        out: Tensor | None,
        args: AttendArgs,
        tail: bytes,
    ) -> None:
        q = queries_of(q, args.heads, args.meta)
        to = 0 if out is None else out.data_ptr()
        call = self._attend_call(q, to, args)
        if self._of(q).attend_part(call + tail, torch.get_num_threads()):
            raise IndexError("attend: a row's context lies outside its block table")
