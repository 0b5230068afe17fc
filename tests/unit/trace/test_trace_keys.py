"""Tests the block keys that are made from a trace's hashes: one for each full block, and equal
exactly where prefixes are equal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.trace.blocks import private_keys, prompt_keys


@pytest.mark.parametrize("block_tokens", [16, 64, 256, 512, 1024, 2048])
def test_one_key_per_full_block(block_tokens: int) -> None:
    for input_tokens in (1, 15, 16, 511, 512, 513, 1023, 1024, 5000):
        ids = range(-(-input_tokens // 512))
        keys = prompt_keys(ids, input_tokens, 512, block_tokens)
        assert len(keys) == input_tokens // block_tokens
        assert len(set(keys)) == len(keys)
        assert all(isinstance(key, bytes) and len(key) == 16 for key in keys)


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
    st.sampled_from([64, 256, 512, 1024]),
)
def test_keys_are_equal_exactly_where_prefixes_are(
    a: list[int], b: list[int], block_tokens: int
) -> None:
    """The prompts consist of whole trace blocks. As in a trace, an id names the prefix up to its
    block."""
    names: dict[tuple[int, ...], int] = {}

    def ids(prompt: list[int]) -> list[int]:
        return [names.setdefault(tuple(prompt[: i + 1]), len(names)) for i in range(len(prompt))]

    keys_a = prompt_keys(ids(a), 512 * len(a), 512, block_tokens)
    keys_b = prompt_keys(ids(b), 512 * len(b), 512, block_tokens)
    for place in range(min(len(keys_a), len(keys_b))):
        end = -(-(place + 1) * block_tokens // 512)
        assert (keys_a[place] == keys_b[place]) == (a[:end] == b[:end])
    assert not set(keys_a) & set(keys_b) - set(keys_a[: len(keys_b)]) - set(keys_b[: len(keys_a)])


def test_a_partial_last_trace_block_yields_its_full_parts() -> None:
    keys = prompt_keys([7, 8], 512 + 200, 512, 64)
    assert len(keys) == 8 + 3
    assert keys[:8] == prompt_keys([7], 512, 512, 64)


def test_block_sizes_that_do_not_fit_name_one_that_does() -> None:
    with pytest.raises(ValueError, match=r"set pool.block_tokens to 128"):
        prompt_keys([1], 512, 512, 100)


def test_without_hashes_prompts_share_nothing() -> None:
    assert prompt_keys((), 700, 0, 64) == ()
    one, other = private_keys(1, 700, 64), private_keys(2, 700, 64)
    assert len(one) == len(other) == 10
    assert len({*one, *other, *prompt_keys([1, 2], 700, 512, 64)}) == 30
