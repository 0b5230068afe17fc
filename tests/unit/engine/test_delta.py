"""Tests linear attention with states in blocks: its results equal those of the plain rule, and
those of other partitions of the same prompt."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moonpool.protocol.block_layout import BlockLayout
from moonpool.text.model_error import ModelError
from moonpool_engine.engine.delta.reference import state_view
from moonpool_engine.engine.families.config import parse_config
from moonpool_engine.engine.native import available
from moonpool_engine.engine.ops import DeltaArgs, DeltaWeights, KvCache, Ops, StateError, StepMeta
from moonpool_engine.engine.reference import ReferenceOps
from moonpool_engine.engine.spec import DeltaSpec

SPEC = DeltaSpec(key_heads=2, value_heads=4, key_dim=32, value_dim=48, taps=5)
BLOCK = 16
LAYOUT = BlockLayout(
    model_fingerprint="m", dtype="float32", block_tokens=BLOCK, num_layers=2, num_kv_heads=4,
    head_dim=80,
)  # fmt: skip
NUM_BLOCKS = 40


def ops_of(name: str) -> Ops:
    if name == "reference":
        return ReferenceOps()
    if reason := available():
        pytest.skip(reason)
    from moonpool_engine.engine.native.ops import NativeOps

    return NativeOps()


def weights(seed: int = 0) -> DeltaWeights:
    draw = torch.Generator().manual_seed(seed)
    return DeltaWeights(
        taps=torch.randn(SPEC.taps, SPEC.channels, generator=draw) * 0.5,
        decay=torch.rand(SPEC.value_heads, generator=draw) * 2,
        step_bias=torch.randn(SPEC.value_heads, generator=draw),
        norm=torch.rand(SPEC.value_dim, generator=draw) + 0.5,
        eps=1e-6,
    )


def empty() -> KvCache:
    blocks = torch.full((NUM_BLOCKS, LAYOUT.num_layers, LAYOUT.slice_elements), torch.nan)
    return KvCache(blocks, LAYOUT)


def meta_of(parts: list[tuple[int, int, list[int]]], unchecked: tuple[int, ...] = ()) -> StepMeta:
    """Makes sequences of (start, rows, blocks)."""
    counts = torch.tensor([rows for _, rows, _ in parts])
    starts = torch.tensor([0, *counts.cumsum(0).tolist()], dtype=torch.int32)
    tables = torch.zeros(len(parts), max(len(blocks) for *_, blocks in parts), dtype=torch.int32)
    for s, (_, _, blocks) in enumerate(parts):
        tables[s, : len(blocks)] = torch.tensor(blocks)
    return StepMeta(
        positions=torch.cat([torch.arange(a, a + n) for a, n, _ in parts]).int(),
        row_starts=starts,
        context_starts=torch.tensor([start for start, *_ in parts], dtype=torch.int32),
        block_tables=tables,
        num_rows=int(counts.sum()),
        num_sequences=len(parts),
        unchecked=unchecked,
    )


def exact(rows: Tensor, own: DeltaWeights) -> Tensor:
    """Computes the rule in float64, with all rows of a sequence at once where that is possible."""
    x, own = rows.double(), DeltaWeights(*(w.double() for w in own[:4]), own.eps)
    mixed, z, b, a = x.split((SPEC.channels, SPEC.values, SPEC.value_heads, SPEC.value_heads), 1)
    before = torch.cat((torch.zeros(SPEC.taps - 1, SPEC.channels).double(), mixed))
    summed = sum(before[tap : tap + len(x)] * own.taps[tap] for tap in range(SPEC.taps))
    keys, group = SPEC.key_heads * SPEC.key_dim, SPEC.value_heads // SPEC.key_heads
    q, k, v = torch.nn.functional.silu(summed).split((keys, keys, SPEC.values), 1)
    q, k = (each.unflatten(1, (SPEC.key_heads, -1)) for each in (q, k))
    q, k = (each / (each.square().sum(2, keepdim=True) + 1e-6).sqrt() for each in (q, k))
    q, k = (each.repeat_interleave(group, 1) for each in (q * SPEC.key_dim**-0.5, k))
    v, z = v.unflatten(1, (SPEC.value_heads, -1)), z.unflatten(1, (SPEC.value_heads, -1))
    decay = (-own.decay * torch.nn.functional.softplus(a + own.step_bias)).exp()
    state = torch.zeros(SPEC.value_heads, SPEC.key_dim, SPEC.value_dim).double()
    found = []
    for t in range(len(x)):
        state = state * decay[t][:, None, None]
        change = (v[t] - torch.einsum("hkv,hk->hv", state, k[t])) * b[t].sigmoid()[:, None]
        state = state + torch.einsum("hk,hv->hkv", k[t], change)
        out = torch.einsum("hkv,hk->hv", state, q[t])
        normed = out / (out.square().mean(1, keepdim=True) + own.eps).sqrt() * own.norm
        found.append((normed * torch.nn.functional.silu(z[t])).flatten())
    return torch.stack(found)


def rows(count: int, seed: int) -> Tensor:
    return torch.randn(count, SPEC.width, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["reference", "native"])
def test_it_is_the_rule(name: str) -> None:
    own, x = weights(), rows(70, 1)
    args = DeltaArgs(SPEC, empty(), 1, meta_of([(0, 70, list(range(5)))]))
    wanted = exact(x, own)
    assert (ops_of(name).delta_rule(x, own, args) - wanted).abs().max() < 2e-5 * wanted.abs().max()


@pytest.mark.parametrize("name", ["reference", "native"])
@settings(max_examples=15)
@given(seed=st.integers(0, 1000), cuts=st.lists(st.integers(1, 89), max_size=6, unique=True))
def test_chunks_neighbours_and_blocks_change_no_bit(name: str, seed: int, cuts: list[int]) -> None:
    ops, own, x = ops_of(name), weights(seed), rows(90, seed)
    alone = DeltaArgs(SPEC, empty(), 0, meta_of([(0, 90, [9, 8, 7, 6, 5, 4])]))
    wanted = ops.delta_rule(x, own, alone)
    blocks, others = [30, 3, 22, 14, 5, 39], [1, 2, 0, 4, 6, 7]
    cache = empty()
    edges = [0, *sorted(cuts), 90]
    for number, (start, end) in enumerate(pairwise(edges)):
        # The other sequence begins without a state in each step, and stands before or after this
        # one.
        mine, other = (start, end - start, blocks), (0, 3 + number, others)
        noise = rows(3 + number, seed + 1)
        first = number % 2 == 0
        parts, given = (
            ([mine, other], (x[start:end], noise))
            if first
            else ([other, mine], (noise, x[start:end]))
        )
        got = ops.delta_rule(torch.cat(given), own, DeltaArgs(SPEC, cache, 1, meta_of(parts)))
        got = got[: end - start] if first else got[3 + number :]
        assert torch.equal(got, wanted[start:end])
    for place in range(6):  # full blocks and the last block have the states of the whole prompt
        ours = state_view(cache.blocks, 1, blocks[place], SPEC)
        theirs = state_view(alone.cache.blocks, 0, 9 - place, SPEC)
        assert int(ours.num_tokens) == int(theirs.num_tokens) == min(16 * (place + 1), 90)
        assert torch.equal(ours.heads, theirs.heads) and torch.equal(ours.rows, theirs.rows)


@pytest.mark.parametrize("name", ["reference", "native"])
def test_another_state_than_the_steps_start_is_refused(name: str) -> None:
    ops, own, cache = ops_of(name), weights(), empty()
    ops.delta_rule(rows(20, 1), own, DeltaArgs(SPEC, cache, 0, meta_of([(0, 20, [1, 2])])))
    kept = cache.blocks.clone()
    wrong = meta_of([(0, 2, [5]), (21, 1, [1, 2])])
    with pytest.raises(StateError):
        ops.delta_rule(rows(3, 2), own, DeltaArgs(SPEC, cache, 0, wrong))
    if name == "native":  # the native operation checks all sequences before it writes
        assert torch.equal(cache.blocks.nan_to_num(), kept.nan_to_num())
    unchecked = meta_of([(21, 1, [1, 2])], unchecked=(0,))
    found = ops.delta_rule(rows(1, 2), own, DeltaArgs(SPEC, cache, 0, unchecked))
    assert torch.isfinite(found).all()


def test_the_kernel_refuses_what_does_not_fit() -> None:
    ops, own, cache = ops_of("native"), weights(), empty()
    meta = meta_of([(0, 3, [1])])
    with pytest.raises(ValueError, match="expected"):
        ops.delta_rule(rows(4, 1), own, DeltaArgs(SPEC, cache, 0, meta))
    with pytest.raises(IndexError):
        ops.delta_rule(rows(3, 1), own, DeltaArgs(SPEC, cache, 2, meta))
    outside = meta_of([(0, 3, [NUM_BLOCKS])])
    with pytest.raises(IndexError):
        ops.delta_rule(rows(3, 1), own, DeltaArgs(SPEC, cache, 0, outside))
    with pytest.raises(ValueError, match="does not fit"):
        ops.delta_rule(
            rows(3, 1),
            own._replace(taps=own.taps[:, 1:].contiguous()),
            DeltaArgs(SPEC, cache, 0, meta),
        )


CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
}  # fmt: skip


def test_every_fourth_layer_has_full_attention_unless_the_config_names_the_kinds() -> None:
    spec = parse_config(CONFIG)
    assert spec.delta_layers == (0, 1, 2) and spec.gated_heads
    assert spec.rope.rotary_dim == 8
    named = parse_config(CONFIG | {"layer_types": ["full_attention", "linear_attention"] * 2})
    assert named.delta_layers == (1, 3)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"linear_num_value_heads": 17}, "no multiple"),
        ({"linear_key_head_dim": 24}, "multiples of 16"),
        ({"linear_value_head_dim": 512}, "up to 256"),
        ({"linear_conv_kernel_dim": 9}, "2 to 8"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"layer_types": ["mamba"] * 4}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        parse_config(CONFIG | changes)
