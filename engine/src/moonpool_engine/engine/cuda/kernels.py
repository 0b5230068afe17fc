"""Triton kernels for GPUs. Importing this module needs Triton.

The kernels are our own because library kernels are not batch-invariant
(docs/decisions/batch-invariance.md, gpu.md).
Here every sum runs in one fixed order over tiles of fixed size, counted from token 0 or feature 0,
for any number of rows. Padding rows of a tile change nothing, since tensor cores compute each row
by itself. A tile of keys that a row may not see adds exact zeros. So the number of rows in a
program, and the assignment of keys to programs, do not change a bit.

Names: T rows, S sequences, B blocks. All tensors are dense unless a stride is an argument; strides
count elements.
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
    """y [rows, outs] = x [rows, width] @ w [outs, width].T + b [outs].

    Grid: one program per BLOCK_M x BLOCK_N tile of y. PRECISION is "ieee" or "tf32".
    """
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
    """RMSNorm of x [rows, width] by weight [width] into y [rows, width].

    With ADD the kernel stores x + residual in residual [rows, width] and norms that sum.
    Grid: one program per row; BLOCK is a power of two of at least width.
    """
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
    """x [rows, 2 * width] -> y [rows, width]: silu(first half) * second half.

    Grid: rows x tiles of BLOCK columns.
    """
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
    """Norms and rotates q and k; writes q, and stores k and v in their blocks.

    Inputs: qkv [T, HEADS + 2 * KV_HEADS, HEAD_DIM]; cos, sin [positions, HEAD_DIM / 2];
    q_weight, k_weight [HEAD_DIM], read with QK_NORM; positions, sequences [T] int32;
    tables [S, table_width] int32.
    Outputs: q [T, HEADS, HEAD_DIM]; keys, values [B, BLOCK_TOKENS, KV_HEADS, HEAD_DIM] of one
    layer, with block_stride elements from block to block.
    Grid: T x (HEADS + 2 * KV_HEADS), one head of one row per program. HALF is a power of two of at
    least HEAD_DIM / 2. A row at position -1 is padding and writes nothing.
    """
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
    """Online softmax of rows q [BLOCK_M, BLOCK_D] over the keys begin .. end - 1 of one KV head.

    Returns the maximum score [BLOCK_M], the sum of weights [BLOCK_M] and the weighted values
    [BLOCK_M, BLOCK_D]. A row that may see none of the keys has maximum -inf and sum 0.
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
    """Combines the softmax states of two runs of keys, the earlier run first."""
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
    """Causal attention of a tile of tokens, with all query heads of one KV head, in runs of keys.

    A tile has BLOCK_M rows: BLOCK_M / GROUP tokens of one sequence, times the GROUP query heads of
    one KV head. Without APART a program walks all runs of SPLIT keys and writes the output. With
    APART a program computes one run, and `merge_kernel` combines the runs.

    Inputs
      q                        [T, HEADS, HEAD_DIM]
      keys, values             [B, BLOCK_TOKENS, KV_HEADS, HEAD_DIM] of one layer, with block_stride
                               elements from block to block
      tile_sequences           [tiles] int32, the sequence of each tile
      tile_firsts              [tiles] int32, the tile's first token among the sequence's new tokens
      row_starts               [S + 1] int32, the first row of each sequence in q
      contexts                 [S] int32, the cached tokens of each sequence
      tables                   [S, table_width] int32, block tables
      scale_log2               factor of the scores times log2(e), since weights are exp2
    Outputs
      out                      [T, HEADS, HEAD_DIM], without APART
      best, total              [tiles, KV_HEADS, num_splits, BLOCK_M] float32, with APART
      part                     [tiles, KV_HEADS, num_splits, BLOCK_M, BLOCK_D] float32, with APART
    Grid: tiles x KV_HEADS x (num_splits with APART, else 1).
    BLOCK_N keys make one tile of keys; BLOCK_D is a power of two of at least HEAD_DIM.
    """
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
    """Combines the runs of a tile, in the order in which `attend_kernel` without APART does.

    Arguments are as in `attend_kernel`. Grid: tiles x KV_HEADS.
    """
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
