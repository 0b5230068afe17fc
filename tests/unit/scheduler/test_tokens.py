"""Tests prompt and answer as one sequence, without a copy of the prompt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.types import Tokens

IDS = st.lists(st.integers(0, 99), max_size=8)


@given(IDS.filter(bool), IDS, IDS, st.integers(-20, 20), st.integers(-20, 20))
def test_tokens_equal_the_list_they_represent(
    prompt: list[int], before_fault: list[int], generated: list[int], start: int, stop: int
) -> None:
    tokens = Tokens((*prompt, *before_fault), len(prompt))
    plain = [*prompt, *before_fault]
    for token_id in generated[:2]:
        tokens.append(token_id)
    tokens.extend(generated[2:])
    plain += generated
    assert len(tokens) == len(plain) and list(tokens) == plain
    assert list(tokens[start:stop]) == plain[start:stop]
    assert tokens[-1] == plain[-1] and tokens[0] == plain[0]
    assert list(tokens.generated) == before_fault + generated
    assert tokens.num_generated == len(before_fault) + len(generated)


def test_a_range_as_prompt_is_never_copied() -> None:
    prompt = range(1_000_000_000)
    tokens = Tokens(prompt, len(prompt))
    tokens.append(7)
    assert tokens[512:1024] == range(512, 1024) and tokens[-1] == 7
    assert tokens.pop() == 7 and len(tokens) == len(prompt)
    with pytest.raises(IndexError):
        tokens.pop()
