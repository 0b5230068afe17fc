"""Tests every parameter of a draw at its smallest, largest and denormal values, against plain
Python.

The numbers that choose a token are spread evenly over [0, 1), so the share of each token is its
probability within one draw: the tests need no tolerance for chance.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from moonpool.text.grammar import Mask
from moonpool.types import BadWord, SamplingParams
from moonpool_engine.engine import sampler
from moonpool_engine.engine.sampler import Draw

NUM_DRAWS = 200
TINY = 5e-324
EXTREMES = [TINY, 1e-320, 2.3e-308, 1e-300, 1e-45, 1e-38, 1e-20, 1e-10, 1e-5, 0.01, 0.5, 1.0, 2.0]
LARGEST = float(np.finfo(np.float32).max)
ONE_AT_A_TIME = [
    *({"temperature": t} for t in EXTREMES),
    *({"temperature": t, "logprobs": 20} for t in (0.0, TINY, 2.0)),
    *({"top_p": p} for p in (0.0, TINY, 1e-300, 1e-17, 0.5, 1 - 2**-53, 1.0)),
    *({"top_p": p, "temperature": TINY} for p in (0.0, TINY, 0.5, 1.0)),
    *({"top_k": k} for k in (0, 1, 2, 6, 7, 2**31 - 1)),
    *({"min_p": p} for p in (0.0, TINY, 1e-300, 0.5, 1.0)),
    *({"presence_penalty": p} for p in (-2.0, -TINY, TINY, 2.0)),
    *({"frequency_penalty": p} for p in (-2.0, -TINY, TINY, 2.0)),
    *({"repetition_penalty": p} for p in (0.01, 1 - 2**-53, 1 + 2**-52, 100.0)),
    *({"logit_bias": ((0, b), (5, -b))} for b in (-100.0, TINY, 100.0)),
    *({"seed": s} for s in (0, 1, 2**63 - 1)),
    *({"min_tokens": n} for n in (0, 1, 2**31 - 1)),
    {"min_tokens": 9, "stop_token_ids": tuple(range(7))},
    *({"logprobs": n} for n in (0, 1, 7, 20)),
    {"logprobs": 0, "logprob_token_ids": (6, 0, 3)},
    {"allowed_token_ids": (2,)},
    {"allowed_token_ids": tuple(range(7)), "temperature": TINY},
    {"bad_words": (BadWord("a", ((0,), (1, 2), (3, 1, 4))),)},
]
LOOKS_BACK = {"presence_penalty", "frequency_penalty", "repetition_penalty"}
LOOKS_BACK |= {"min_tokens", "bad_words"}
"""The parameters whose effect depends on the generated tokens."""
ROWS = {
    "plain": [2.0, 1.0, 0.5, 0.0, -1.0, -3.0, -9.0],
    "ties": [1.0, 3.0, 3.0, 3.0, 1.0, 1.0, 1.0],
    "flat": [0.0] * 7,
    "huge": [LARGEST, -LARGEST, 1.0, LARGEST, 0.0, -1.0, -LARGEST],
    "denormal": [1e-45, 0.0, -1e-45, 1e-40, -0.0, 2e-45, -1e-38],
    "masked": [-math.inf, 0.0, -math.inf, 1.0, 1.0, -math.inf, -2.0],
    "single": [-math.inf] * 6 + [-5.0],
}


@dataclass
class Case:
    """One row of logits, and the parameters of a draw from it."""

    row: Sequence[float]
    params: SamplingParams
    generated: Sequence[int] = ()
    prompt: frozenset[int] = frozenset()
    ends: Sequence[int] = ()
    allowed: Mask | None = None


class _OneMask:
    """Stands for a grammar in one state."""

    def __init__(self, mask: Mask) -> None:
        self._mask = mask

    def allowed(self, grammar: str, generated: Sequence[int]) -> Mask:
        return self._mask


def logits_of(case: Case) -> list[float]:
    """Returns the logits after biases, penalties and masks, by the documented rules alone."""
    params, row = case.params, [float(np.float32(x)) for x in case.row]
    for token_id, bias in params.logit_bias:
        row[token_id] += bias
    for token_id in case.prompt | set(case.generated):
        factor = params.repetition_penalty
        if factor != 1:
            row[token_id] = row[token_id] / factor if row[token_id] > 0 else row[token_id] * factor
    for token_id, count in Counter(case.generated).items():
        row[token_id] -= params.presence_penalty + params.frequency_penalty * count
    banned = set()
    if case.allowed is not None:
        banned |= {i for i, may in enumerate(case.allowed) if not may}
    if params.allowed_token_ids:
        banned |= set(range(len(row))) - set(params.allowed_token_ids)
    for word in params.bad_words:
        for ids in word.token_ids:
            if len(ids) == 1 or tuple(case.generated[-len(ids) + 1 :]) == ids[:-1]:
                banned.add(ids[-1])
    row = _without(row, banned, [row[i] if i in case.ends else -math.inf for i in range(len(row))])
    if len(case.generated) < params.min_tokens:
        early = set(params.stop_token_ids) | (set() if params.ignore_eos else set(case.ends))
        row = _without(row, early, row)
    return row


def _without(row: list[float], banned: set[int], otherwise: list[float]) -> list[float]:
    """Returns the row without the banned tokens. If no token is left, returns `otherwise`, or the
    row without it."""
    kept = [-math.inf if i in banned else x for i, x in enumerate(row)]
    return next((r for r in (kept, otherwise) if max(r) > -math.inf), row)


def distribution(case: Case) -> list[float] | None:
    """Returns the probability of each token, or None where rounding would decide."""
    params, row = case.params, logits_of(case)
    if params.temperature == 0:
        return [float(i == row.index(max(row))) for i in range(len(row))]
    weights = [math.exp((x - max(row)) / params.temperature) for x in row]
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    kept = order[: params.top_k] if params.top_k else order
    if params.top_p < 1:
        total = math.fsum(weights[i] for i in kept)
        reached = [math.fsum(weights[i] for i in kept[: n + 1]) / total for n in range(len(kept))]
        if any(p != 1 and abs(p - params.top_p) < 1e-9 for p in reached):
            return None
        kept = kept[: next((n + 1 for n, p in enumerate(reached) if p >= params.top_p), len(kept))]
    if params.min_p > 0:
        if any(0 < abs(w - params.min_p) < 1e-9 * params.min_p for w in weights):
            return None
        kept = [i for i in kept if weights[i] >= params.min_p]
    total = math.fsum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(row))]


@pytest.fixture
def evenly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Replaces the random number of a draw by its position, spread evenly over [0, 1). Warnings are
    errors."""
    monkeypatch.setattr(sampler, "uniform", lambda seed, position: (position + 0.5) / NUM_DRAWS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def check(case: Case) -> bool:
    """Checks the case. Returns whether it is decisive, because in some cases rounding decides."""
    params, expected = case.params, distribution(case)
    if expected is None:
        return False
    if case.allowed is not None:
        params = _with_grammar(params)
    grammars = None if case.allowed is None else _OneMask(case.allowed)
    draw = Draw(params, tuple(case.generated), tuple(case.ends), case.prompt)
    rows = torch.tensor([list(case.row)], dtype=torch.float32).expand(NUM_DRAWS, -1)
    drawn = sampler.sample(rows, [draw] * NUM_DRAWS, range(NUM_DRAWS), grammars)  # type: ignore[arg-type]
    counts = Counter(token.token_id for (token,) in drawn)
    for token_id, probability in enumerate(expected):
        share = counts[token_id] / NUM_DRAWS
        assert abs(share - probability) <= 1 / NUM_DRAWS + 1e-9, (token_id, share, probability)
        assert probability > 0 or not share, f"token {token_id} has no probability"
    if params.logprobs is not None:
        check_logprobs(case, drawn[0][0].token_id, drawn[0][0].logprobs)
    return True


def check_logprobs(case: Case, token_id: int, found: object) -> None:
    expected = torch.log_softmax(torch.tensor(case.row, dtype=torch.float32).double(), -1).tolist()
    assert isinstance(found, sampler.TokenLogprobs)
    assert found.logprob == pytest.approx(expected[token_id], abs=1e-9, rel=1e-12)
    row = torch.tensor(case.row, dtype=torch.float32).tolist()
    most = min(case.params.logprobs or 0, len(row))
    ids = sorted(range(len(row)), key=lambda i: (-row[i], i))[:most]
    listed = case.params.logprob_token_ids
    ids = [token_id, *(i for i in listed if i != token_id)] if listed else ids
    assert [i for i, _ in found.top] == ids
    assert [p for _, p in found.top] == pytest.approx([expected[i] for i in ids], rel=1e-12)


def _with_grammar(params: SamplingParams) -> SamplingParams:
    values = {name: getattr(params, name) for name in SamplingParams.__struct_fields__}
    return SamplingParams(**(values | {"grammar": "one mask"}))


@pytest.mark.usefixtures("evenly")
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_each_parameter_alone_draws_as_plain_arithmetic(row: list[float]) -> None:
    for params in ONE_AT_A_TIME:
        for generated in ((), (0, 0, 3), (3, 1)) if LOOKS_BACK & params.keys() else ((3, 1),):
            made = SamplingParams(**params)  # type: ignore[arg-type]
            check(Case(row, made, generated, frozenset({1, 5}), ends=(6,)))


extreme = st.sampled_from(EXTREMES)
logit = st.one_of(
    st.floats(-20, 20, width=32),
    st.sampled_from([0.0, -0.0, 1.0, 1e-45, -1e-45, LARGEST, -LARGEST, -math.inf]),
)
penalty = st.one_of(st.sampled_from([0.0, TINY, -TINY, -2.0, 2.0]), st.floats(-2, 2))
ids = st.integers(0, 5)
words = st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=3)
drawing = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), extreme, st.floats(0, 2)),
    top_p=st.one_of(st.sampled_from([1.0, TINY, 0.0, 1 - 2**-53]), st.floats(0, 1)),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 6, 2**31 - 1]),
    min_p=st.one_of(st.sampled_from([0.0, TINY, 1.0]), st.floats(0, 1)),
    presence_penalty=penalty,
    frequency_penalty=penalty,
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.01, 100)),
    logit_bias=st.lists(st.tuples(ids, st.sampled_from([-100.0, TINY, 100.0])), max_size=2).map(
        tuple
    ),
    min_tokens=st.sampled_from([0, 2, 2**31 - 1]),
    stop_token_ids=st.lists(ids, max_size=6).map(tuple),
    ignore_eos=st.booleans(),
    logprobs=st.sampled_from([None, 0, 3, 20]),
    allowed_token_ids=st.one_of(st.just(()), st.lists(ids, min_size=1, max_size=6).map(tuple)),
    bad_words=words.map(lambda w: (BadWord("w", tuple(w)),) if w else ()),
)
cases = st.builds(
    Case,
    row=st.lists(logit, min_size=6, max_size=6).filter(lambda row: max(row) > -math.inf),
    params=drawing,
    generated=st.lists(ids, max_size=4).map(tuple),
    prompt=st.frozensets(ids, max_size=3),
    ends=st.lists(ids, max_size=2, unique=True).map(tuple),
    allowed=st.one_of(
        st.none(),
        st.lists(st.booleans(), min_size=6, max_size=6).filter(any).map(np.array),
    ),
)


@given(case=cases)
def test_any_combination_draws_as_plain_arithmetic(case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(sampler, "uniform", lambda seed, position: (position + 0.5) / NUM_DRAWS)
        assume(check(case))


def test_the_largest_of_many_equal_ones_are_those_of_the_lowest_ids() -> None:
    row = np.zeros(3000)
    row[[7, 2999]] = 1.0
    assert sampler.largest_ids(row, 5).tolist() == [7, 2999, 0, 1, 2]
    row[::2] = -np.inf
    assert sampler.largest_ids(row, 2000)[:4].tolist() == [7, 2999, 1, 3]


def test_a_rank_counts_the_tokens_before() -> None:
    rows = torch.tensor([[0.0, 2.0, 1.0, 2.0]] * 4)
    ranks = [found.rank for found in sampler.score(rows, [0, 1, 2, 3], [0, 2, 0, 0])]
    assert ranks == [4, 1, 3, 2]
