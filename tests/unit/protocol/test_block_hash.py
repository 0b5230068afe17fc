"""Tests block keys, which identify whole prefixes: golden values, chaining, and prompts that must
not share blocks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.protocol.block_layout import KEY_BYTES, BlockLayout, block_keys, extend_keys, root_key

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "block_keys.json").read_text())
ROOT = root_key(b"layout", "")
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["name"])
def test_golden(case: dict) -> None:
    """Keys are sent between processes and stored, so a change of the keys would be a change of
    format."""
    root = root_key(bytes.fromhex(case["layout_fingerprint"]), case["tenant"])
    assert root.hex() == case["root"]
    keys = block_keys(case["tokens"], case["block_tokens"], root)
    assert [key.hex() for key in keys] == case["keys"]


@given(TOKENS, st.integers(1, 9))
def test_only_full_blocks_have_keys(tokens: list[int], block_tokens: int) -> None:
    keys = block_keys(tokens, block_tokens, ROOT)
    assert len(keys) == len(tokens) // block_tokens
    assert all(len(key) == KEY_BYTES for key in keys)
    assert len(set(keys)) == len(keys)


@given(TOKENS, TOKENS, st.integers(1, 9))
def test_equal_keys_are_equal_prefixes(one: list[int], two: list[int], block_tokens: int) -> None:
    ours, theirs = block_keys(one, block_tokens, ROOT), block_keys(two, block_tokens, ROOT)
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        end = (index + 1) * block_tokens
        assert (a == b) == (one[:end] == two[:end])


@given(TOKENS, st.integers(1, 9), st.integers(0, 40))
def test_extending_equals_hashing_at_once(tokens: list[int], block_tokens: int, cut: int) -> None:
    keys = block_keys(tokens[:cut], block_tokens, ROOT)
    extend_keys(keys, tokens, block_tokens, ROOT)
    assert keys == block_keys(tokens, block_tokens, ROOT)


def test_tenants_and_layouts_never_share() -> None:
    roots = {
        root_key(fingerprint, tenant)
        for fingerprint in (b"", b"a", b"ab", b"b")
        for tenant in ("", "a", "b", "ab", "\ud800")
    }
    assert len(roots) == 20
    keys = {block_keys([1, 2, 3], 1, root)[0] for root in roots}
    assert len(keys) == 20


def test_a_layout_that_differs_in_anything_has_its_own_fingerprint() -> None:
    base = {
        "model_fingerprint": "m",
        "dtype": "float32",
        "block_tokens": 16,
        "num_layers": 2,
        "num_kv_heads": 4,
        "head_dim": 8,
        "inner": "x",
        "arithmetic": "a",
    }
    changes = {
        "model_fingerprint": "n",
        "dtype": "bfloat16",
        "block_tokens": 32,
        "num_layers": 3,
        "num_kv_heads": 2,
        "head_dim": 16,
        "inner": "y",
        "arithmetic": "b",
    }
    prints = {BlockLayout(**base).fingerprint}
    prints |= {BlockLayout(**{**base, name: value}).fingerprint for name, value in changes.items()}
    assert len(prints) == 1 + len(changes)


def test_layout_sums() -> None:
    layout = BlockLayout(
        model_fingerprint="m",
        dtype="bfloat16",
        block_tokens=16,
        num_layers=3,
        num_kv_heads=4,
        head_dim=8,
    )
    assert layout.slice_bytes == 2 * 4 * 16 * 8 * 2
    assert layout.block_bytes == 3 * layout.slice_bytes
    assert layout.token_bytes * 16 == layout.block_bytes
    assert [layout.blocks_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
