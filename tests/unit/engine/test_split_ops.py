"""Tests that attention in parts gives the bits of a single pass, and is correct up to float32
rounding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from moonpool.protocol.block_layout import BlockLayout
from moonpool_engine.engine import native
from moonpool_engine.engine.ops import (
    SEGMENT,
    AttendArgs,
    HeadShape,
    KvCache,
    QkNorm,
    RopeTable,
    SplitOps,
    StepMeta,
    empty_cache,
)
from moonpool_engine.engine.reference import ReferenceSplitOps
from moonpool_engine.engine.slices import read_rows

HEADS = HeadShape(4, 2, 32)
SCALE = 32**-0.5
BLOCK_TOKENS = 64


def native_ops() -> SplitOps:
    missing = native.available()
    if missing is not None:
        pytest.skip(missing)
    from moonpool_engine.engine.native.split import NativeSplitOps

    return NativeSplitOps()


@pytest.fixture(
    params=[
        ("native", "float32"),
        ("native", "bfloat16"),
        ("reference", "float32"),
        pytest.param(("reference", "bfloat16"), marks=pytest.mark.long),  # slow
    ],
    ids="-".join,
)
def kind(request: pytest.FixtureRequest) -> tuple[str, str]:
    found: tuple[str, str] = request.param
    return found


@pytest.fixture
def ops(kind: tuple[str, str]) -> SplitOps:
    return native_ops() if kind[0] == "native" else ReferenceSplitOps()


@pytest.fixture
def dtype(kind: tuple[str, str]) -> str:
    return kind[1]


def layout(dtype: str) -> BlockLayout:
    return BlockLayout(
        model_fingerprint="split",
        dtype=dtype,
        block_tokens=BLOCK_TOKENS,
        num_layers=2,
        num_kv_heads=HEADS.num_kv_heads,
        head_dim=HEADS.head_dim,
    )


def filled(dtype: str, num_blocks: int, seed: int = 0) -> KvCache:
    cache = empty_cache(layout(dtype), num_blocks)
    cache.blocks.copy_(torch.randn(cache.blocks.shape, generator=torch.manual_seed(seed)))
    return cache


def meta_of(shares: list[tuple[int, int]], tables: list[list[int]] | None = None) -> StepMeta:
    """Makes a step of sequences (cached tokens, new rows), by default in disjoint blocks."""
    needed = [-(-(start + rows) // BLOCK_TOKENS) for start, rows in shares]
    if tables is None:
        ids = iter(range(sum(needed)))
        tables = [[next(ids) for _ in range(count)] for count in needed]
    width = max(map(len, tables))
    bounds = [0]
    for _, rows in shares:
        bounds.append(bounds[-1] + rows)
    positions = [start + i for start, rows in shares for i in range(rows)]
    return StepMeta(
        positions=torch.tensor(positions, dtype=torch.int32),
        row_starts=torch.tensor(bounds, dtype=torch.int32),
        context_starts=torch.tensor([start for start, _ in shares], dtype=torch.int32),
        block_tables=torch.tensor(
            [table + [0] * (width - len(table)) for table in tables], dtype=torch.int32
        ),
        num_rows=bounds[-1],
        num_sequences=len(shares),
    )


def queries(meta: StepMeta, dtype: str, seed: int = 1) -> Tensor:
    shape = (meta.num_rows, HEADS.num_heads, HEADS.head_dim)
    q = torch.randn(shape, generator=torch.manual_seed(seed))
    return q.to(getattr(torch, dtype))


SHARES = [
    [(0, 1)],
    [(5, 1), (255, 1), (256, 1), (700, 3)],
    [(SEGMENT - 2, 6), (SEGMENT, 1), (SEGMENT - 1, 1)],
    [(2 * SEGMENT + 300, 1), (10, 70)],
]


@pytest.mark.parametrize("shares", SHARES)
def test_old_tokens_first_gives_the_same_bits(
    ops: SplitOps, dtype: str, shares: list[tuple[int, int]]
) -> None:
    meta = meta_of(shares)
    cache = filled(dtype, int(meta.block_tables.max()) + 1)
    q = queries(meta, dtype)
    whole = ops.attend(q, AttendArgs(HEADS, cache, 1, meta, SCALE))
    state = ops.attend_old(q, AttendArgs(HEADS, cache, 1, meta, SCALE))
    assert torch.equal(whole, ops.attend_new(q, state, AttendArgs(HEADS, cache, 1, meta, SCALE)))


def test_old_tokens_are_attended_without_a_look_at_the_new_ones() -> None:
    ops = native_ops()
    meta = meta_of([(600, 4)])
    cache = filled("float32", 10)
    q = queries(meta, "float32")
    whole = ops.attend(q, AttendArgs(HEADS, cache, 0, meta, SCALE))
    kept = cache.blocks[8:].clone()
    cache.blocks[8:] = torch.nan  # spoils the tokens from 512 on
    state = ops.attend_old(q, AttendArgs(HEADS, cache, 0, meta, SCALE))
    cache.blocks[8:] = kept
    cache.blocks[:8] = torch.nan  # The step must not read the earlier tokens again.
    assert torch.equal(whole, ops.attend_new(q, state, AttendArgs(HEADS, cache, 0, meta, SCALE)))


def segments_of(
    ops: SplitOps, q: Tensor, cache: KvCache, shares: list[tuple[int, int]], meta: StepMeta
) -> Tensor:
    """Computes every sequence alone, segment by segment, with the blocks of that segment."""
    dtype = q.dtype
    partials: list[Tensor] = []
    order: list[list[int]] = [[] for _ in range(meta.num_rows)]
    count = 0
    per_segment = SEGMENT // BLOCK_TOKENS
    for s, (start, rows) in enumerate(shares):
        first = int(meta.row_starts[s])
        for segment in range(-(-(start + rows) // SEGMENT)):
            table = meta.block_tables[s].tolist()
            blocks = range(segment * per_segment, (segment + 1) * per_segment)
            foreign = cache.blocks.shape[0] - 1  # a block that holds NaN
            table = [b if i in blocks else foreign for i, b in enumerate(table)]
            own = meta_of([(start, rows)], [table])
            wanted = torch.tensor([segment], dtype=torch.int32)
            rows_q = q[first : first + rows]
            args = AttendArgs(HEADS, cache, 1, own, SCALE)
            partials.append(ops.attend_segments(rows_q, wanted, args))
            for i in range(rows):
                order[first + i].append(count + i)
            count += rows
    starts = torch.tensor([0, *map(len, order)], dtype=torch.int32).cumsum(0).int()
    flat = torch.tensor([i for row in order for i in row], dtype=torch.int32)
    return ops.merge(torch.cat(partials), flat, starts, dtype)


@pytest.mark.parametrize("shares", SHARES)
def test_segments_merged_give_the_same_bits(
    ops: SplitOps, dtype: str, shares: list[tuple[int, int]]
) -> None:
    meta = meta_of(shares)
    cache = filled(dtype, int(meta.block_tables.max()) + 2)
    cache.blocks[-1] = torch.nan
    q = queries(meta, dtype)
    whole = ops.attend(q, AttendArgs(HEADS, cache, 1, meta, SCALE))
    assert torch.equal(whole, segments_of(ops, q, cache, shares, meta))


def exact(q: Tensor, cache: KvCache, meta: StepMeta) -> tuple[Tensor, Tensor]:
    """Computes one row per sequence in float64: the output, and the log of the sum of weights."""
    outs, sums = [], []
    for s, context in enumerate(meta.context_starts.tolist()):
        k, v = read_rows(cache, 1, meta.block_tables[s], context + 1)
        group = HEADS.num_heads // HEADS.num_kv_heads
        k = k.double().repeat_interleave(group, dim=1)
        v = v.double().repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,thd->ht", q[s].double(), k) * SCALE
        sums.append(scores.logsumexp(-1))
        outs.append(torch.einsum("ht,thd->hd", scores.softmax(-1), v))
    return torch.stack(outs), torch.stack(sums)


def test_error_of_the_merge_is_float32_rounding(ops: SplitOps) -> None:
    shares = [(4 * SEGMENT + 100, 1), (SEGMENT, 1)]
    meta = meta_of(shares)
    cache = filled("float32", int(meta.block_tables.max()) + 2)
    cache.blocks[-1] = torch.nan
    q = 3 * queries(meta, "float32")  # peaked weights
    merged = segments_of(ops, q, cache, shares, meta).view(2, 4, 32).double()
    whole, _ = exact(q, cache, meta)
    assert (merged - whole).norm() / whole.norm() < 2e-6


def test_partials_hold_the_log_sum_of_the_weights(ops: SplitOps) -> None:
    """The log has this meaning for kernels with base 2 and with base e."""
    meta = meta_of([(300, 1)])
    cache = filled("float32", 5)
    q = queries(meta, "float32")
    zero = torch.zeros(1, dtype=torch.int32)
    partials = ops.attend_segments(q, zero, AttendArgs(HEADS, cache, 1, meta, SCALE))
    highest, total = partials[0, :, 0], partials[0, :, 1]
    natural = highest * math.log(2) if ops.name == "native" else highest
    _, expected = exact(q, cache, meta)
    torch.testing.assert_close((natural + total.log()).double(), expected[0], atol=1e-5, rtol=0)


def test_what_is_empty_or_masked_is_the_identity(ops: SplitOps) -> None:
    """The chunk lies across a segment's end. Its first rows see no key of the second segment, and
    no row sees a key of the third."""
    shares = [(SEGMENT - 2, 4)]
    meta = meta_of(shares, [list(range(33)) + [0] * 40])
    cache = filled("float32", 33)
    q = queries(meta, "float32")
    for segment, empty in ((1, [0, 1]), (2, [0, 1, 2, 3])):
        wanted = torch.tensor([segment], dtype=torch.int32)
        partials = ops.attend_segments(q, wanted, AttendArgs(HEADS, cache, 1, meta, SCALE))
        assert not partials.isnan().any()
        assert partials[empty][:, :, 0].eq(-torch.inf).all()
        assert partials[empty][:, :, 1:].eq(0).all()
    nothing = torch.zeros(1, 4, 34)
    nothing[:, :, 0] = -torch.inf
    zero = torch.zeros(1, dtype=torch.int32)
    first = ops.attend_segments(q, zero, AttendArgs(HEADS, cache, 1, meta, SCALE))
    both = torch.cat((nothing, first[:1]))

    def merged(order: list[int]) -> Tensor:
        starts = torch.tensor([0, len(order)], dtype=torch.int32)
        return ops.merge(both, torch.tensor(order, dtype=torch.int32), starts, torch.float32)

    assert torch.equal(merged([1]), merged([0, 1]))
    assert torch.equal(merged([1]), merged([1, 0]))
    assert merged([0]).eq(0).all()
    assert merged([0, 0]).eq(0).all()
    assert merged([]).eq(0).all()


@pytest.mark.parametrize("normed", [False, True])
def test_rope_apart_from_storing_gives_the_same_blocks(
    ops: SplitOps, dtype: str, normed: bool
) -> None:
    meta = meta_of([(0, 70), (100, 1)])
    kind = getattr(torch, dtype)
    qkv = torch.randn(meta.num_rows, 8 * 32, generator=torch.manual_seed(3)).to(kind)
    angles = torch.randn(200, 16, generator=torch.manual_seed(4))
    rope = RopeTable(angles.cos(), angles.sin())
    norm = None
    if normed:
        norm = QkNorm(torch.rand(32), torch.rand(32), 1e-6)
    one, other = filled(dtype, 4), filled(dtype, 4)
    q = ops.rope_store(qkv, rope, norm, AttendArgs(HEADS, one, 1, meta, SCALE))
    q_apart, kv = ops.rope(qkv, HEADS, rope, norm, meta)
    ops.store(kv, AttendArgs(HEADS, other, 1, meta, SCALE))
    assert torch.equal(q, q_apart)
    assert torch.equal(one.blocks, other.blocks)


def test_wrong_tables_are_refused() -> None:
    ops = native_ops()
    cache = filled("float32", 2)
    meta = meta_of([(130, 1)], [[0, 1, 7]])
    kv = torch.zeros(1, 4, 32)
    with pytest.raises(IndexError):
        ops.store(kv, AttendArgs(HEADS, cache, 0, meta, SCALE))
    with pytest.raises(IndexError):
        ops.attend_old(
            queries(meta_of([(300, 1)]), "float32"),
            AttendArgs(HEADS, cache, 0, meta_of([(300, 1)], [[0, 1, 7, 0, 1]]), SCALE),
        )
    one, starts = torch.ones(1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    with pytest.raises(IndexError):
        ops.merge(torch.zeros(1, 4, 34), one, starts, torch.float32)
