"""Compares NativeOps' rope_store and attend with float64 computations of this module, and with
themselves on parts of a step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from moonpool.protocol.block_layout import BlockLayout
from moonpool_engine.engine.native import available
from moonpool_engine.engine.native.library import ISAS, NativeUnavailableError
from moonpool_engine.engine.native.ops import NativeOps
from moonpool_engine.engine.ops import (
    PLAIN,
    AttendArgs,
    AttendRule,
    HeadShape,
    KvCache,
    QkNorm,
    RopeTable,
    StepMeta,
    empty_cache,
)
from moonpool_engine.engine.reference import ReferenceOps
from moonpool_engine.engine.slices import INNER, LATENT_INNER, read_rows, write_rows

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(available() is not None, reason=str(available())),
]

LAYERS, LAYER = 3, 1
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SHAPES = [  # heads, block_tokens
    (HeadShape(14, 2, 64), 64),
    (HeadShape(20, 4, 64), 16),
    (HeadShape(8, 8, 80), 48),
    (HeadShape(4, 1, 256), 16),
    (HeadShape(6, 2, 96), 32),
    (HeadShape(16, 8, 128), 128),
    (HeadShape(3, 3, 16), 256),
    (HeadShape(32, 1, 48), 64),
]
# (tokens before, rows) of each sequence: first tokens, decodes, chunks; on and off block ends
MIXED = [(0, 1), (700, 1), (0, 130), (255, 1), (255, 2), (256, 33), (300, 77), (63, 1), (511, 1)]


@pytest.fixture(params=ISAS, scope="module")
def ops(request: pytest.FixtureRequest) -> NativeOps:
    try:
        return NativeOps(request.param)
    except NativeUnavailableError as error:
        pytest.skip(str(error))


@dataclass(frozen=True)
class Case:
    heads: HeadShape
    cache: KvCache
    meta: StepMeta
    q: Tensor
    keys: list[Tensor]  # one tensor [context, kv_heads, head_dim] for each sequence
    values: list[Tensor]
    rule: AttendRule = PLAIN

    @property
    def scale(self) -> float:
        return self.heads.head_dim**-0.5

    def attend(self, ops: NativeOps | ReferenceOps) -> Tensor:
        args = AttendArgs(self.heads, self.cache, LAYER, self.meta, self.scale, self.rule)
        return ops.attend(self.q, args)


def make_meta(sequences: list[tuple[int, int]], tables: Tensor) -> StepMeta:
    starts = [0]
    for _, count in sequences:
        starts.append(starts[-1] + count)
    positions = [torch.arange(before, before + count) for before, count in sequences]
    return StepMeta(
        positions=torch.cat(positions).int(),
        row_starts=torch.tensor(starts, dtype=torch.int32),
        context_starts=torch.tensor([before for before, _ in sequences], dtype=torch.int32),
        block_tables=tables.int().contiguous(),
        num_rows=starts[-1],
        num_sequences=len(sequences),
    )


def make_tables(
    layout: BlockLayout, sequences: list[tuple[int, int]], generator: torch.Generator
) -> tuple[Tensor, int]:
    """Returns permuted, disjoint block tables, and the number of blocks, of which some are
    unused."""
    counts = [layout.blocks_for(before + count) for before, count in sequences]
    order = torch.randperm(sum(counts) + 3, generator=generator)
    tables = torch.zeros(len(sequences), max(counts) + 1, dtype=torch.int32)
    taken = 0
    for s, count in enumerate(counts):
        tables[s, :count] = order[taken : taken + count]
        taken += count
    return tables, len(order)


def make_layout(heads: HeadShape, block_tokens: int, dtype: torch.dtype) -> BlockLayout:
    return BlockLayout(
        model_fingerprint="test",
        dtype=DTYPES[dtype],
        block_tokens=block_tokens,
        num_layers=LAYERS,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        inner=LATENT_INNER if heads.latent_dim else INNER,
    )


def make_case(
    heads: HeadShape,
    block_tokens: int,
    dtype: torch.dtype,
    sequences: list[tuple[int, int]],
    seed: int = 0,
) -> Case:
    """Returns random K, V and q; the rest of the arena is NaN."""
    generator = torch.Generator().manual_seed(seed)
    layout = make_layout(heads, block_tokens, dtype)
    tables, num_blocks = make_tables(layout, sequences, generator)
    cache = empty_cache(layout, num_blocks)
    cache.blocks.fill_(torch.nan)
    keys, values = [], []
    for s, (before, count) in enumerate(sequences):
        shape = (before + count, heads.num_kv_heads, heads.head_dim)
        k = torch.randn(shape, generator=generator).to(dtype)
        v = torch.randn(shape, generator=generator).to(dtype)
        tokens = torch.arange(before + count)
        blocks = tables[s][tokens // block_tokens]
        write_rows(cache, LAYER, blocks, tokens % block_tokens, k, v)
        keys.append(k)
        values.append(k[..., heads.head_dim - heads.latent_dim :] if heads.latent_dim else v)
    meta = make_meta(sequences, tables)
    q = torch.randn(meta.num_rows, heads.num_heads, heads.head_dim, generator=generator).to(dtype)
    return Case(heads, cache, meta, q * 2, keys, values)


def exact_attention(case: Case) -> Tensor:
    outs = []
    group = case.heads.num_heads // case.heads.num_kv_heads
    starts = case.meta.row_starts.tolist()
    for s in range(case.meta.num_sequences):
        rows = slice(starts[s], starts[s + 1])
        k = case.keys[s].double().repeat_interleave(group, 1)
        v = case.values[s].double().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", case.q[rows].double(), k) * case.scale
        positions, tokens = case.meta.positions[rows].unsqueeze(1), torch.arange(k.shape[0])
        hidden = tokens > positions
        if case.rule.soft_cap:
            scores = torch.tanh(scores / case.rule.soft_cap) * case.rule.soft_cap
        if case.rule.window:
            hidden |= tokens <= positions - case.rule.window
        sinks = torch.full((case.heads.num_heads,), -torch.inf)
        if case.rule.sinks is not None:
            sinks = case.rule.sinks
        sinks = sinks.double().view(-1, 1, 1).expand(-1, len(positions), 1)
        scores = torch.cat((scores.masked_fill(hidden, -torch.inf), sinks), -1)
        weights = scores.softmax(-1)[..., :-1]
        outs.append(torch.einsum("hqk,khd->qhd", weights, v).flatten(1))
    return torch.cat(outs)


def one_sequence(case: Case, s: int, first: int, count: int) -> Case:
    """Makes a step with only rows [first, first + count) of sequence s."""
    start = int(case.meta.row_starts[s]) + first
    before = int(case.meta.context_starts[s]) + first
    meta = make_meta([(before, count)], case.meta.block_tables[s : s + 1])
    return replace(case, meta=meta, q=case.q[start : start + count])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "block_tokens"), SHAPES)
def test_attend_matches_float64_over_a_ragged_batch_in_nan_space(
    ops: NativeOps, heads: HeadShape, block_tokens: int, dtype: torch.dtype
) -> None:
    case = make_case(heads, block_tokens, dtype, MIXED)
    got = case.attend(ops)
    assert got.shape == (case.meta.num_rows, heads.num_heads * heads.head_dim)
    assert (got.double() - exact_attention(case)).abs().max() < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "block_tokens"), SHAPES)
def test_attend_gives_a_row_the_same_bits_in_any_chunk(
    ops: NativeOps, heads: HeadShape, block_tokens: int, dtype: torch.dtype
) -> None:
    case = make_case(heads, block_tokens, dtype, [(0, 1), (290, 300), (100, 3)], seed=1)
    whole = case.attend(ops)[1:301]
    cuts = torch.randperm(299, generator=torch.Generator().manual_seed(2))[:7].add(1)
    edges = [0, *sorted(cuts.tolist()), 300]
    for first, last in pairwise(edges):
        part = one_sequence(case, 1, first, last - first).attend(ops)
        assert torch.equal(part, whole[first:last]), f"rows {first}..{last}"
    for row in (0, 1, 222, 299):
        alone = one_sequence(case, 1, row, 1).attend(ops)
        assert torch.equal(alone[0], whole[row]), f"row {row} as a decode"


RULES = {
    "window": AttendRule(window=100),
    "small window": AttendRule(window=3),
    "window of a span": AttendRule(window=256),
    "cap": AttendRule(soft_cap=1.5),
    "sinks": AttendRule(sinks=torch.linspace(-3, 9, 8)),
    "all": AttendRule(window=77, soft_cap=2.0, sinks=torch.linspace(-3, 3, 8)),
}
LONG = [(2040, 40), (0, 300), (4200, 1)]  # contexts on both sides of a segment's end


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RULES)
def test_windows_caps_and_sinks_match_float64_and_keep_a_rows_bits(
    ops: NativeOps, name: str, dtype: torch.dtype
) -> None:
    case = replace(make_case(HeadShape(8, 2, 48), 32, dtype, LONG), rule=RULES[name])
    got = case.attend(ops)
    assert (got.double() - exact_attention(case)).abs().max() < TOLERANCE[dtype]
    reference = case.attend(ReferenceOps())
    assert (got.float() - reference.float()).abs().max() < TOLERANCE[dtype]
    starts = case.meta.row_starts.tolist()
    for s, first, count in (
        (0, 0, 8),
        (0, 7, 13),
        (0, 39, 1),
        (1, 90, 150),
        (1, 299, 1),
        (2, 0, 1),
    ):
        rows = slice(starts[s] + first, starts[s] + first + count)
        part = one_sequence(case, s, first, count)
        assert torch.equal(part.attend(ops), got[rows]), (s, first, count)
        assert torch.equal(part.attend(ReferenceOps()), reference[rows]), (s, first, count)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "heads", [HeadShape(3, 1, 48, 32), HeadShape(16, 1, 80, 64), HeadShape(70, 1, 576, 512)]
)
def test_latents_are_keys_and_values(ops: NativeOps, heads: HeadShape, dtype: torch.dtype) -> None:
    sequences = [(2040, 20), (0, 3), (255, 2)] if heads.num_heads < 70 else [(300, 2), (0, 1)]
    case = make_case(heads, 32, dtype, sequences)
    got = case.attend(ops)
    assert got.shape == (case.meta.num_rows, heads.num_heads * heads.latent_dim)
    assert (got.double() - exact_attention(case)).abs().max() < TOLERANCE[dtype]
    for row in range(2):
        alone = one_sequence(case, 0, row, 1)
        assert torch.equal(alone.attend(ops)[0], got[row])


@pytest.mark.parametrize("dtype", DTYPES)
def test_attend_does_not_depend_on_threads(ops: NativeOps, dtype: torch.dtype) -> None:
    case = make_case(HeadShape(14, 2, 64), 64, dtype, MIXED)
    one = case.attend(ops)
    torch.set_num_threads(3)
    assert torch.equal(case.attend(ops), one)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attend_keeps_to_extreme_scores(ops: NativeOps, dtype: torch.dtype) -> None:
    case = make_case(HeadShape(2, 1, 32), 32, dtype, [(500, 20)])
    sharp = replace(case, q=case.q * 100)
    got = sharp.attend(ops)
    # In float32, a score of a few hundred alone has an error of 2^-15.
    assert (got.double() - exact_attention(sharp)).abs().max() < 2e-4 + TOLERANCE[dtype]


def rope_table(max_positions: int, rotary_dim: int) -> RopeTable:
    speeds = 10000.0 ** -(torch.arange(0, rotary_dim, 2).double() / rotary_dim)
    angles = torch.arange(max_positions).double().unsqueeze(1) * speeds
    return RopeTable(angles.cos().float(), angles.sin().float())


def exact_turn(x: Tensor, weight: Tensor | None, rope: RopeTable, positions: Tensor) -> Tensor:
    x = x.double()
    if weight is not None:
        x = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    half = rope.cos.shape[1]
    cos = rope.cos[positions.long()].double().unsqueeze(1)
    sin = rope.sin[positions.long()].double().unsqueeze(1)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary", [1.0, 0.5])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("heads", "block_tokens"), SHAPES[2:4] + SHAPES[-2:])
def test_rope_store_turns_q_and_writes_only_its_rows(
    ops: NativeOps,
    heads: HeadShape,
    block_tokens: int,
    dtype: torch.dtype,
    rotary: float,
    normed: bool,
) -> None:
    generator = torch.Generator().manual_seed(3)
    sequences = [(0, 1), (block_tokens - 1, 3), (5, 70), (17, 1)]
    layout = make_layout(heads, block_tokens, dtype)
    tables, num_blocks = make_tables(layout, sequences, generator)
    meta = make_meta(sequences, tables)
    cache = empty_cache(layout, num_blocks)
    d = heads.head_dim
    width = heads.num_heads + 2 * heads.num_kv_heads
    qkv = torch.randn(meta.num_rows, width * d, generator=generator).to(dtype)
    weights = [1 + 0.1 * torch.randn(d, generator=generator) for _ in range(2)]
    norm = QkNorm(weights[0], weights[1], 1e-6) if normed else None
    rope = rope_table(600, int(d * rotary))
    got = ops.rope_store(qkv, rope, norm, AttendArgs(heads, cache, LAYER, meta, 1.0))

    q, k, v = qkv.unflatten(1, (width, d)).split(
        [heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], 1
    )
    bound = 1e-5 if dtype == torch.float32 else 2**-8
    want = exact_turn(q, weights[0] if normed else None, rope, meta.positions)
    assert ((got.double() - want).abs() <= bound * (1 + want.abs())).all()
    want = exact_turn(k, weights[1] if normed else None, rope, meta.positions)
    written = 0
    for s, (before, count) in enumerate(sequences):
        rows = slice(int(meta.row_starts[s]), int(meta.row_starts[s + 1]))
        stored_k, stored_v = read_rows(cache, LAYER, tables[s], before + count)
        assert torch.equal(stored_v[before:], v[rows])
        assert ((stored_k[before:] - want[rows]).abs() <= bound * (1 + want[rows].abs())).all()
        written += stored_v[before:].count_nonzero() + stored_k[before:].count_nonzero()
    assert cache.blocks.count_nonzero() == written


def test_a_row_outside_the_tables_is_an_error_and_no_crash(ops: NativeOps) -> None:
    case = make_case(HeadShape(4, 2, 32), 16, torch.float32, [(30, 2)])
    qkv = torch.zeros(2, 8 * 32)
    rope = rope_table(64, 32)
    args = AttendArgs(case.heads, case.cache, LAYER, case.meta, 1.0)
    lost = replace(case.meta, positions=torch.tensor([30, 500], dtype=torch.int32))
    with pytest.raises(IndexError, match="block table"):
        ops.attend(case.q, args._replace(meta=lost))
    with pytest.raises(IndexError, match="block table or rope"):
        ops.rope_store(qkv, rope, None, args._replace(meta=lost))
    astray = replace(case.meta, block_tables=torch.full((1, 3), 9999, dtype=torch.int32))
    with pytest.raises(IndexError):
        ops.attend(case.q, args._replace(meta=astray))
    jumbled = replace(case.meta, row_starts=torch.tensor([2, 2], dtype=torch.int32))
    with pytest.raises(ValueError, match="row_starts"):
        ops.attend(case.q, args._replace(meta=jumbled))
    with pytest.raises(ValueError, match="does not fit"):
        ops.attend(case.q.bfloat16(), args)


@pytest.mark.parametrize("dtype", DTYPES)
def test_agrees_with_the_reference_ops(ops: NativeOps, dtype: torch.dtype) -> None:
    case = make_case(HeadShape(14, 2, 64), 64, dtype, [(100, 5), (0, 20), (64, 1)])
    difference = case.attend(ops).float() - case.attend(ReferenceOps()).float()
    assert difference.abs().max() < TOLERANCE[dtype]
