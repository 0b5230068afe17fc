"""Tests how tokens are drawn: the limits, the penalties, and independence of the batch."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from moonpool.types import BadWord, SamplingParams, Token
from moonpool_engine.engine import sampler
from moonpool_engine.engine.sampler import Draw, NonFiniteLogitsError, uniform

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def draw(generated: Sequence[int] = (), eos: Sequence[int] = (), **params: object) -> Draw:
    return Draw(SamplingParams(**params), generated, eos)


def sample(rows: torch.Tensor, draws: Sequence[Draw], positions: Sequence[int]) -> list[Token]:
    """Draws one token for each draw, without drafts."""
    return [token for (token,) in sampler.sample(rows, draws, positions)]


def draws_of(count: int, **params: object) -> Counter[int]:
    """Returns tokens drawn from LOGITS at this many positions."""
    rows = LOGITS.expand(count, -1)
    tokens = sample(rows, [draw(seed=11, **params)] * count, range(count))
    return Counter(token.token_id for token in tokens)


def test_greedy_takes_the_first_of_the_largest() -> None:
    rows = torch.tensor([[1.0, 3.0, 3.0], [4.0, 4.0, 0.0]])
    assert [t.token_id for t in sample(rows, [draw(temperature=0.0)] * 2, [5, 6])] == [1, 0]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature: float) -> None:
    expected = torch.softmax(LOGITS / temperature, -1)
    found = draws_of(4000, temperature=temperature)
    for token_id, probability in enumerate(expected.tolist()):
        spread = math.sqrt(probability / 4000)
        assert abs(found[token_id] / 4000 - probability) < 4 * spread


def test_limits_keep_the_right_tokens() -> None:
    # The probabilities are about .555 .204 .124 .075 .028 .004.
    assert set(draws_of(500, top_k=2)) == {0, 1}
    assert set(draws_of(500, top_k=1)) == {0}
    assert set(draws_of(500, top_p=0.5)) == {0}
    assert set(draws_of(500, top_p=0.8)) == {0, 1, 2}
    assert set(draws_of(500, min_p=0.3)) == {0, 1}
    assert set(draws_of(500, min_p=0.2, top_p=0.99)) == {0, 1, 2}
    assert set(draws_of(500, top_k=3, top_p=0.7)) == {0, 1}
    assert set(draws_of(800)) >= {0, 1, 2, 3, 4}


def test_top_p_over_a_flat_and_large_vocabulary() -> None:
    row = torch.zeros(1, 5000)
    tokens = {sample(row, [draw(top_p=0.9, seed=3)], [p])[0].token_id for p in range(300)}
    assert max(tokens) < 4501
    assert max(tokens) > 3500


def test_a_draw_depends_on_seed_and_position_alone() -> None:
    rows = torch.randn(40, 500, generator=torch.Generator().manual_seed(1))
    asked = [draw(seed=i % 3, temperature=1 + i / 40, top_p=0.95) for i in range(40)]
    asked[7] = draw(temperature=0.0)
    together = sample(rows, asked, range(40))
    alone = [sample(rows[i : i + 1], [asked[i]], [i])[0] for i in range(40)]
    assert together == alone
    moved = sample(rows, asked, range(1, 41))
    assert together != moved


def test_uniform_is_uniform_and_keyed() -> None:
    numbers = [uniform(seed, position) for seed in range(50) for position in range(50)]
    assert len(set(numbers)) == 2500
    assert 0 <= min(numbers) < 0.01
    assert 0.99 < max(numbers) < 1
    assert abs(sum(numbers) / 2500 - 0.5) < 0.02
    assert uniform(-1, 3) == uniform(2**64 - 1, 3)


def test_golden_uniform() -> None:
    """These tokens were recorded, because a seeded request must give the same answer after an
    upgrade."""
    assert uniform(42, 1000).hex() == "0x1.5455d36f84b6ep-1"


def test_penalties_count_what_was_generated() -> None:
    row = LOGITS.unsqueeze(0)

    def greedy(generated: Sequence[int], **params: float) -> int:
        asked = Draw(SamplingParams(temperature=0.0, **params), generated, ())
        return sample(row, [asked], [9])[0].token_id

    assert greedy([0], presence_penalty=0.9) == 0
    assert greedy([0], presence_penalty=1.1) == 1
    assert greedy([0, 0], presence_penalty=0.9) == 0
    assert greedy([0, 0], frequency_penalty=0.6) == 1
    assert greedy([], frequency_penalty=2.0) == 0


def test_a_repetition_penalty_is_what_transformers_makes_of_it() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(2)) * 5
    prompt, generated = [3, 7, 7, 12, 40], [5, 3, 48]
    for penalty in (0.5, 1.3, 4.0):
        theirs = RepetitionPenaltyLogitsProcessor(penalty=penalty)(
            torch.tensor([prompt + generated] * 6), logits
        )
        params = SamplingParams(temperature=0.0, repetition_penalty=penalty)
        asked = Draw(params, generated, (), frozenset(prompt))
        drawn = sample(logits, [asked] * 6, range(6))
        assert [token.token_id for token in drawn] == theirs.argmax(-1).tolist()
    assert theirs.argmax(-1).tolist() != logits.argmax(-1).tolist()


def test_bad_words_are_those_that_transformers_bans() -> None:
    from transformers import NoBadWordsLogitsProcessor

    logits = torch.randn(300, 12, generator=torch.Generator().manual_seed(3))
    rng = random.Random(4)
    num_banned = 0
    for row in logits:
        generated = [rng.randrange(12) for _ in range(rng.randrange(5))]
        words = [[rng.randrange(12) for _ in range(rng.choice((1, 2, 2, 3)))] for _ in range(9)]
        ids = torch.tensor([generated], dtype=torch.long)
        theirs = NoBadWordsLogitsProcessor(words)(ids, row.unsqueeze(0).clone())
        params = SamplingParams(
            temperature=0.0, bad_words=tuple(BadWord("", (tuple(word),)) for word in words)
        )
        (token,) = sample(row.unsqueeze(0), [Draw(params, generated, ())], [0])
        assert token.token_id == int(theirs.argmax())
        num_banned += token.token_id != int(row.argmax())
    assert num_banned > 30


def test_biases_are_added_to_the_logits_of_any_draw() -> None:
    row = LOGITS.unsqueeze(0)

    def one(bias: tuple[tuple[int, float], ...], **params: Any) -> Token:
        asked = Draw(SamplingParams(logit_bias=bias, **params), [], ())
        return sample(row, [asked], [9])[0]

    assert one((), temperature=0.0).token_id == 0
    assert one(((0, -100.0),), temperature=0.0).token_id == 1
    assert {one(((3, 100.0),), seed=seed).token_id for seed in range(20)} == {3}
    # The reported logprobs must stay those that the model gives a token.
    told = one(((3, 100.0),), temperature=0.0, logprobs=0).logprobs
    assert told is not None and told.logprob < -0.5


def test_min_tokens_bans_the_ends_until_then() -> None:
    row = LOGITS.unsqueeze(0)

    def greedy(count: int, **params: object) -> int:
        asked = draw([3] * count, [0], temperature=0.0, stop_token_ids=(1,), **params)
        return sample(row, [asked], [9])[0].token_id

    assert greedy(2, min_tokens=3) == 2
    assert greedy(3, min_tokens=3) == 0
    assert greedy(2, min_tokens=3, ignore_eos=True) == 0


def test_logprobs_are_the_models_own() -> None:
    expected = torch.log_softmax(LOGITS.double(), -1).tolist()
    asked = draw([0, 0], temperature=0.0, frequency_penalty=2.0, presence_penalty=0.0, logprobs=2)
    token = sample(LOGITS.unsqueeze(0), [asked], [1])[0]
    assert token.token_id == 1
    assert token.logprobs is not None
    assert token.logprobs.logprob == pytest.approx(expected[1])
    assert [i for i, _ in token.logprobs.top] == [0, 1]
    assert [p for _, p in token.logprobs.top] == pytest.approx(expected[:2])
    none = sample(LOGITS.unsqueeze(0), [draw(temperature=0.0, logprobs=0)], [1])[0]
    assert none.logprobs is not None
    assert none.logprobs.top == ()


def test_nan_is_an_error_not_a_token() -> None:
    rows = torch.zeros(2, 8)
    rows[1, 3] = torch.nan
    for temperature in (0.0, 1.0):
        with pytest.raises(NonFiniteLogitsError, match="row 1"):
            sample(rows, [draw(temperature=temperature)] * 2, [0, 0])
    with pytest.raises(NonFiniteLogitsError, match="of the prompt"):
        sampler.score(rows, [0, 0], [0, 0])


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.0, "logprobs": 2},
        {"temperature": 0.7, "seed": 1, "frequency_penalty": 1.5, "presence_penalty": 0.5},
        {"temperature": 0.0, "repetition_penalty": 1.8},
        {"temperature": 0.0, "min_tokens": 6},
        {"temperature": 1.0, "seed": 3, "logit_bias": ((2, 1.0),)},
    ],
    ids=str,
)
def test_drafts_change_no_token(params: dict[str, Any]) -> None:
    """Whatever the drafts are, the tokens must equal those that are drawn one by one from the same
    rows."""
    rows = torch.randn(400, 6, generator=torch.Generator().manual_seed(9)) * 2
    rng, num_drawn = random.Random(2), 0
    for begin in range(0, 360, 9):
        generated, plain = [1, 1, 2], list[Token]()
        while len(plain) < 5:
            asked = Draw(SamplingParams(**params), tuple(generated), (0,), frozenset({4}))
            row = begin + len(plain)
            plain += sample(rows[row : row + 1], [asked], [50 + len(plain)])
            generated.append(plain[-1].token_id)
        drafts = [token.token_id for token in plain[:4]]
        wrong = rng.randrange(5)
        if wrong < 4:
            drafts[wrong] = (drafts[wrong] + 1) % 6
        asked = Draw(SamplingParams(**params), (1, 1, 2), (0,), frozenset({4}), drafts)
        other = Draw(SamplingParams(temperature=0.0), (), (0,))
        together = rows[[begin + 8, *range(begin, begin + 5), begin + 8]]
        first, found, last = sampler.sample(together, [other, asked, other], [0, 50, 0])
        assert list(found) == plain[: wrong + 1]
        assert first == last and len(first) == 1
        num_drawn += len(found)
    assert num_drawn > 100
