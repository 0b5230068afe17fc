"""Triton kernels of the GPU's operations. Importing this needs Triton.

Rows do not see each other here: every sum runs in one fixed order over tiles of fixed size, counted
from token 0 or feature 0, whatever the number of rows. Rows that fill up a tile change nothing, as
tensor cores work out each row by itself; nor does a tile of keys that a row may not see, as it adds
exact zeros. How many rows share a program is free, then, and so is who works on which keys.
"""

# Triton's language, not Python's: constants of a kernel are arguments in capitals, without types.
# mypy: ignore-errors
# ruff: noqa: N803, N806

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def linear_kernel(
    x_ptr, w_ptr, b_ptr, y_ptr, rows, width, outs,
    HAS_BIAS: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """y [rows, outs] = x [rows, width] @ w [outs, width].T + b; all dense."""
    tiles_m, tiles_n = tl.cdiv(rows, BLOCK_M), tl.cdiv(outs, BLOCK_N)
    program = tl.program_id(0)
    # Programs that run together share weights and rows in the L2 cache.
    group = program // (GROUP_M * tiles_n)
    first_m = group * GROUP_M
    size_m = min(tiles_m - first_m, GROUP_M)
    tile_m = first_m + (program % (GROUP_M * tiles_n)) % size_m
    tile_n = (program % (GROUP_M * tiles_n)) // size_m
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x = x_ptr + m[:, None].to(tl.int64) * width + k[None, :]
    w = w_ptr + n[None, :].to(tl.int64) * width + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k0 in range(0, width, BLOCK_K):
        inside = k < width - k0
        a = tl.load(x, mask=(m[:, None] < rows) & inside[None, :], other=0.0)
        b = tl.load(w, mask=(n[None, :] < outs) & inside[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
        x += BLOCK_K
        w += BLOCK_K
    if HAS_BIAS:
        total += tl.load(b_ptr + n, mask=n < outs, other=0.0).to(tl.float32)[None, :]
    y = y_ptr + m[:, None].to(tl.int64) * outs + n[None, :]
    tl.store(y, total.to(y_ptr.dtype.element_ty), mask=(m[:, None] < rows) & (n[None, :] < outs))


@triton.jit
def norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, width, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """RMSNorm of a row; with ADD, of residual += x, which is stored back."""
    row = tl.program_id(0).to(tl.int64) * width
    at = tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(x_ptr + row + at, mask=inside, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row + at, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
        tl.store(residual_ptr + row + at, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y_ptr + row + at, (weight * (wide * scale)).to(x.dtype), mask=inside)


@triton.jit
def silu_mul_kernel(x_ptr, y_ptr, width, BLOCK: tl.constexpr):
    """x [rows, 2 * width] -> y [rows, width]."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(x_ptr + row * 2 * width + at, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    y = wide / (1.0 + tl.exp(-wide)) * up
    tl.store(y_ptr + row * width + at, y.to(gate.dtype), mask=inside)


@triton.jit
def rope_store_kernel(
    qkv_ptr, q_ptr, keys_ptr, values_ptr, cos_ptr, sin_ptr, q_weight_ptr, k_weight_ptr,
    positions_ptr, sequences_ptr, tables_ptr, table_width, block_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, QK_NORM: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """One head of one row: q is normed, rotated and put out; k likewise, and v as it is, go to
    their block. A row at position -1 only fills up its batch: nothing is written."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, HALF)
    position = tl.load(positions_ptr + row)
    inside = (at < HEAD_DIM // 2) & (position >= 0)
    source = qkv_ptr + (row * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM + at
    first = tl.load(source, mask=inside, other=0.0)
    second = tl.load(source + HEAD_DIM // 2, mask=inside, other=0.0)
    if head < HEADS + KV_HEADS:
        if QK_NORM:
            weight_ptr = q_weight_ptr if head < HEADS else k_weight_ptr
            a, b = first.to(tl.float32), second.to(tl.float32)
            scale = tl.rsqrt(tl.sum(a * a + b * b, axis=0) / HEAD_DIM + eps)
            low = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
            high = tl.load(weight_ptr + HEAD_DIM // 2 + at, mask=inside, other=0.0).to(tl.float32)
            first, second = (
                (low * (a * scale)).to(first.dtype),
                (high * (b * scale)).to(first.dtype),
            )
        cos = tl.load(cos_ptr + position * (HEAD_DIM // 2) + at, mask=inside, other=0.0)
        sin = tl.load(sin_ptr + position * (HEAD_DIM // 2) + at, mask=inside, other=0.0)
        a, b = first.to(tl.float32), second.to(tl.float32)
        kind = first.dtype
        first, second = (a * cos - b * sin).to(kind), (b * cos + a * sin).to(kind)
    if head < HEADS:
        target = q_ptr + (row * HEADS + head) * HEAD_DIM + at
    else:
        sequence = tl.load(sequences_ptr + row)
        block = tl.load(tables_ptr + sequence * table_width + position // BLOCK_TOKENS)
        kv_head = (head - HEADS) % KV_HEADS
        place = ((position % BLOCK_TOKENS) * KV_HEADS + kv_head) * HEAD_DIM + at
        base = keys_ptr if head < HEADS + KV_HEADS else values_ptr
        target = base + block.to(tl.int64) * block_stride + place
    tl.store(target, first, mask=inside)
    tl.store(target + HEAD_DIM // 2, second, mask=inside)


@triton.jit
def _over_keys(
    q, keys_ptr, values_ptr, table_ptr, block_stride, kv_head, positions, begin, end, scale_log2,
    KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_TOKENS: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Online softmax of rows q [M, D] over the keys begin..end: maximum, sum and weighted values.

    A row that sees none of them has maximum -inf and sum 0.
    """
    d = tl.arange(0, BLOCK_D)
    best = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    out = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    for n0 in range(begin, end, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        inside = n < end
        block = tl.load(table_ptr + n // BLOCK_TOKENS, mask=inside, other=0).to(tl.int64)
        place = block * block_stride + ((n % BLOCK_TOKENS) * KV_HEADS + kv_head) * HEAD_DIM
        kept = inside[:, None] & (d[None, :] < HEAD_DIM)
        k = tl.load(keys_ptr + place[:, None] + d[None, :], mask=kept, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        scores = tl.where(n[None, :] <= positions[:, None], scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, axis=1))
        finite = tl.where(new_best == -float("inf"), 0.0, new_best)
        weights = tl.exp2(scores - finite[:, None])
        fade = tl.exp2(best - finite)
        total = total * fade + tl.sum(weights, axis=1)
        v = tl.load(values_ptr + place[:, None] + d[None, :], mask=kept, other=0.0)
        out = tl.dot(weights.to(v.dtype), v, out * fade[:, None], input_precision=PRECISION)
        best = new_best
    return best, total, out


@triton.jit
def _merge(best, total, out, part_best, part_total, part_out):
    """What two runs over keys make together."""
    new_best = tl.maximum(best, part_best)
    finite = tl.where(new_best == -float("inf"), 0.0, new_best)
    fade, part_fade = tl.exp2(best - finite), tl.exp2(part_best - finite)
    total = total * fade + part_total * part_fade
    out = out * fade[:, None] + part_out * part_fade[:, None]
    return new_best, total, out


@triton.jit
def attend_kernel(
    q_ptr, keys_ptr, values_ptr, out_ptr, best_ptr, total_ptr, part_ptr,
    tile_sequences_ptr, tile_firsts_ptr, row_starts_ptr, contexts_ptr, tables_ptr,
    table_width, block_stride, scale_log2, num_splits,
    APART: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A tile of tokens of one sequence, with all query heads of one KV head, over its keys in runs
    of SPLIT. With APART each program takes one run and leaves its result to `merge_kernel`."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    sequence, first = tl.load(tile_sequences_ptr + tile), tl.load(tile_firsts_ptr + tile)
    row_start, context = tl.load(row_starts_ptr + sequence), tl.load(contexts_ptr + sequence)
    count = tl.load(row_starts_ptr + sequence + 1) - row_start
    m = tl.arange(0, BLOCK_M)
    token = first + m // GROUP
    valid = (m < BLOCK_M // GROUP * GROUP) & (token < count)
    positions = tl.where(valid, context + token, -1)
    d = tl.arange(0, BLOCK_D)
    row = (row_start + token).to(tl.int64) * HEADS + kv_head * GROUP + m % GROUP
    kept = valid[:, None] & (d[None, :] < HEAD_DIM)
    q = tl.load(q_ptr + row[:, None] * HEAD_DIM + d[None, :], mask=kept, other=0.0)
    end = context + min(first + BLOCK_M // GROUP, count)  # one past the last key any row sees
    table_ptr = tables_ptr + sequence * table_width
    if APART:
        best, total, out = _over_keys(
            q, keys_ptr, values_ptr, table_ptr, block_stride, kv_head, positions,
            split * SPLIT, min(split * SPLIT + SPLIT, end), scale_log2,
            KV_HEADS, HEAD_DIM, BLOCK_TOKENS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        place = ((tile * KV_HEADS + kv_head).to(tl.int64) * num_splits + split) * BLOCK_M + m
        tl.store(best_ptr + place, best, mask=valid)
        tl.store(total_ptr + place, total, mask=valid)
        tl.store(part_ptr + place[:, None] * BLOCK_D + d[None, :], out, mask=valid[:, None])
    else:
        best = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
        total = tl.zeros((BLOCK_M,), dtype=tl.float32)
        out = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
        for begin in range(0, end, SPLIT):
            part_best, part_total, part_out = _over_keys(
                q, keys_ptr, values_ptr, table_ptr, block_stride, kv_head, positions,
                begin, min(begin + SPLIT, end), scale_log2,
                KV_HEADS, HEAD_DIM, BLOCK_TOKENS, PRECISION, BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            best, total, out = _merge(best, total, out, part_best, part_total, part_out)
        result = out / total[:, None]
        target = out_ptr + row[:, None] * HEAD_DIM + d[None, :]
        tl.store(target, result.to(out_ptr.dtype.element_ty), mask=kept)


@triton.jit
def merge_kernel(
    out_ptr, best_ptr, total_ptr, part_ptr,
    tile_sequences_ptr, tile_firsts_ptr, row_starts_ptr, contexts_ptr, num_splits,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Puts the runs of a tile together, in the order in which one program would have."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    sequence, first = tl.load(tile_sequences_ptr + tile), tl.load(tile_firsts_ptr + tile)
    row_start, context = tl.load(row_starts_ptr + sequence), tl.load(contexts_ptr + sequence)
    count = tl.load(row_starts_ptr + sequence + 1) - row_start
    m = tl.arange(0, BLOCK_M)
    token = first + m // GROUP
    valid = (m < BLOCK_M // GROUP * GROUP) & (token < count)
    d = tl.arange(0, BLOCK_D)
    end = context + min(first + BLOCK_M // GROUP, count)
    best = tl.full((BLOCK_M,), -float("inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    out = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    place = (tile * KV_HEADS + kv_head).to(tl.int64) * num_splits * BLOCK_M + m
    for _ in range(0, end, SPLIT):
        part_best = tl.load(best_ptr + place, mask=valid, other=-float("inf"))
        part_total = tl.load(total_ptr + place, mask=valid, other=0.0)
        part = part_ptr + place[:, None] * BLOCK_D + d[None, :]
        part_out = tl.load(part, mask=valid[:, None], other=0.0)
        best, total, out = _merge(best, total, out, part_best, part_total, part_out)
        place += BLOCK_M
    row = (row_start + token).to(tl.int64) * HEADS + kv_head * GROUP + m % GROUP
    kept = valid[:, None] & (d[None, :] < HEAD_DIM)
    target = out_ptr + row[:, None] * HEAD_DIM + d[None, :]
    tl.store(target, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=kept)
