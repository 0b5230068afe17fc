"""Tests that the prompts made for a trace share tokens exactly where the trace's ids are equal,
even if the trace is scaled."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.protocol.block_layout import block_keys
from moonpool.trace.blocks import prompt_keys
from moonpool.trace.builtin import BUILT_IN
from moonpool.trace.generate import generate
from moonpool.trace.row import TraceRow
from moonpool.trace.transform import parse_share, scale_rows
from moonpool_lab.replay.prompts import PromptMaker

SHARE = Fraction(1, 32)


def shared(first: list[int], second: list[int]) -> int:
    count = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        count += 1
    return count


@pytest.mark.parametrize("engine_block", [4, 16, 32])
def test_live_keys_meet_where_the_simulators_do(engine_block: int) -> None:
    """Two blocks must have equal hashes in the engine exactly if they have equal keys in the
    simulator."""
    rows = list(scale_rows(generate(BUILT_IN["conversation"], num_requests=300, seed=3), SHARE))
    maker = PromptMaker(block_tokens=16, vocab_size=300)
    live: dict[bytes, bytes] = {}
    reused = 0
    for number, row in enumerate(rows):
        tokens = maker.token_ids(row, number)
        assert len(tokens) == row.input_tokens
        real = block_keys(tokens, engine_block, b"root")
        named = prompt_keys(row.hash_ids, row.input_tokens, 16, engine_block)
        for name, key in zip(named, real, strict=True):
            reused += name in live
            assert live.setdefault(name, key) == key
    assert reused > 20
    assert len(set(live.values())) == len(live)


def test_prompts_part_where_ids_part() -> None:
    maker = PromptMaker(block_tokens=8, vocab_size=1000)
    first = maker.token_ids(TraceRow(0.0, 20, 1, (1, 2, 3)), 0)
    second = maker.token_ids(TraceRow(0.0, 24, 1, (1, 2, 4)), 1)
    assert shared(first, second) == 16
    # A partial block is the beginning of the block that its id stands for.
    longer = maker.token_ids(TraceRow(0.0, 24, 1, (1, 2, 3)), 2)
    assert longer[:20] == first


def test_without_ids_nothing_is_shared_and_all_repeats() -> None:
    maker = PromptMaker(block_tokens=0, vocab_size=1000)
    rows = [TraceRow(0.0, 700, 1), TraceRow(0.0, 700, 1)]
    first, second = (maker.token_ids(row, number) for number, row in enumerate(rows))
    assert shared(first, second) < 4
    assert maker.token_ids(rows[0], 0) == first
    assert PromptMaker(0, 1000, seed=1).token_ids(rows[0], 0) != first


def test_json_is_the_same_prompt() -> None:
    maker = PromptMaker(block_tokens=8, vocab_size=50)
    row = TraceRow(0.0, 21, 1, (5, 6, 7))
    assert json.loads(maker.json(row, 0)) == maker.token_ids(row, 0)
    assert max(maker.token_ids(row, 0)) < 50
    words = json.loads(PromptMaker(8, 50, as_text=True).json(row, 0)).split()
    assert len(words) == 21


@given(st.integers(1, 10**6), st.integers(1, 10**4), st.sampled_from([1, 2, 16, 64, 512]))
def test_scaling_keeps_every_block(tokens: int, answer: int, part: int) -> None:
    row = TraceRow(1.0, tokens, answer, tuple(range(-(-tokens // 512))))
    (small,) = scale_rows([row], Fraction(1, part))
    assert -(-small.input_tokens // (512 // part)) == len(row.hash_ids)
    assert small.output_tokens >= 1
    assert abs(small.output_tokens - answer / part) <= max(0.5, 1 - answer / part)
    assert small.arrived_s == row.arrived_s and small.hash_ids == row.hash_ids


@pytest.mark.parametrize("text", ["0", "2", "-1/2", "1/0", "half", "nan", ""])
def test_bad_shares_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"share|above 0"):
        parse_share(text)
