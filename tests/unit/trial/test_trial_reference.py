"""Tests that each kind of difference is recognised, and that near-ties do not count as wrong
answers."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool_lab.trial.answer import Answer, TokenDetail
from moonpool_lab.trial.reference import Reference

TIE_NATS = 0.5


def tokens_of(seed: int, count: int = 30) -> list[bytes]:
    rng = random.Random(seed)
    return [f" {rng.getrandbits(32):x}".encode() for _ in range(count)]


def answer_of(pieces: list[bytes], finish: str = "length") -> Answer:
    return Answer(text=b"".join(pieces).decode(), finish=finish)


def reference_of(pieces: list[bytes], gap: float = 9.0, other: bytes = b" other") -> Reference:
    """`other` is less likely than each token by `gap` nats."""
    details = [TokenDetail(piece, -0.1, {piece: -0.1, other: -0.1 - gap}) for piece in pieces]
    answer = answer_of(pieces)
    answer.tokens = details
    return Reference(answer, TIE_NATS)


@given(st.integers(0, 1 << 30), st.integers(0, 22), st.integers(1, 3))
def test_left_out_tokens_are_counted(seed: int, at: int, count: int) -> None:
    pieces = tokens_of(seed)
    found = reference_of(pieces).compare(answer_of(pieces[:at] + pieces[at + count :]))
    assert (found.kind, found.missing_tokens, found.at_token) == ("missing", count, at)
    assert (found.wrong_tokens, found.doubled_tokens) == (0, 0)


@given(st.integers(0, 1 << 30), st.integers(1, 22), st.integers(1, 3))
def test_doubled_tokens_are_counted(seed: int, at: int, count: int) -> None:
    pieces = tokens_of(seed)
    count = min(count, at)
    found = reference_of(pieces).compare(answer_of(pieces[:at] + pieces[at - count :]))
    assert (found.kind, found.doubled_tokens, found.at_token) == ("doubled", count, at)


@given(st.integers(0, 1 << 30), st.integers(0, 22))
def test_a_replaced_token_is_one_wrong_token(seed: int, at: int) -> None:
    pieces = tokens_of(seed)
    found = reference_of(pieces).compare(answer_of([*pieces[:at], b" zzz", *pieces[at + 1 :]]))
    assert (found.kind, found.wrong_tokens, found.at_token) == ("wrong", 1, at)


@given(st.integers(0, 1 << 30), st.integers(0, 29))
def test_another_answer_is_wrong_from_where_it_differs(seed: int, at: int) -> None:
    pieces = tokens_of(seed)
    found = reference_of(pieces).compare(answer_of(pieces[:at] + tokens_of(seed + 1)[at:]))
    assert (found.kind, found.wrong_tokens) == ("wrong", 30 - at)


@pytest.mark.parametrize(("gap", "kind"), [(0.4, "near_tie"), (0.6, "wrong")])
def test_only_a_token_nearly_as_likely_is_a_near_tie(gap: float, kind: str) -> None:
    pieces = tokens_of(1)
    changed = [*pieces[:5], b" other", *tokens_of(2)[6:]]
    assert reference_of(pieces, gap).compare(answer_of(changed)).kind == kind


def test_a_likely_token_that_the_answer_does_not_have_explains_nothing() -> None:
    pieces = tokens_of(1)
    changed = [*pieces[:5], b" another", *tokens_of(2)[6:]]
    reference = reference_of(pieces, gap=0.6)
    assert reference.compare(answer_of(changed)).kind == "wrong"


def test_an_early_end_is_a_near_tie_only_if_the_end_was_likely() -> None:
    pieces = tokens_of(1)
    for gap, kind in ((0.2, "near_tie"), (5.0, "wrong")):
        reference = reference_of(pieces, gap, other=b"</s>")
        assert reference.compare(answer_of(pieces[:9], "stop")).kind == kind
    assert reference.compare(answer_of(pieces[:9], "length")).kind == "missing"


def test_without_logprobs_a_difference_is_unclear_but_gaps_are_not() -> None:
    pieces = tokens_of(1)
    reference = Reference(answer_of(pieces), TIE_NATS)
    assert not reference.has_logprobs
    assert reference.compare(answer_of(pieces)).kind == "right"
    assert reference.compare(answer_of(pieces[:4] + tokens_of(2)[4:])).kind == "unclear"
    assert reference.compare(answer_of(pieces[:4] + pieces[5:])).kind == "missing"
    assert reference.compare(answer_of(pieces[:5] + pieces[4:])).kind == "doubled"


def test_logprobs_of_other_text_are_not_used() -> None:
    answer = answer_of(tokens_of(1))
    answer.tokens = [TokenDetail(b"x", -1.0, {b"x": -1.0})]
    assert not Reference(answer, TIE_NATS).has_logprobs
