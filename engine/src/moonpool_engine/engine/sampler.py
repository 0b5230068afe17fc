"""Draws the next token of each sequence from its logits.

Each draw is keyed by (seed, position of the new token) through a counter-based hash, and rows are
independent. So a request's tokens depend on neither its batch nor its instance. The sampler keeps
no state between steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moonpool.scheduler.actions import StepEntry
from moonpool.text.grammar import Grammars, Mask
from moonpool.types import SamplingParams, Token, TokenLogprobs

Row = NDArray[np.float64]
Ids = NDArray[np.int64]

FIRST_CANDIDATES = 256
KEPT_LISTS = 64
"""Lists of allowed tokens whose arrays are kept between steps."""
_MASK = (1 << 64) - 1


class NonFiniteLogitsError(ArithmeticError):
    """The logits of a row to be sampled contain NaN or infinity."""


@dataclass(frozen=True, slots=True)
class Draw:
    """The rules for drawing one sequence's next token.

    `generated`: the tokens generated so far, including those of this step; the penalties, the bad
    words and `min_tokens` read them. `prompt_ids`: the prompt's distinct tokens if a penalty
    applies to them, or else empty. `drafts`: guesses of the tokens to draw; after each right guess,
    one more token is drawn.
    """

    params: SamplingParams
    generated: Sequence[int]
    eos_token_ids: Sequence[int]
    prompt_ids: frozenset[int] = frozenset()
    drafts: Sequence[int] = ()

    def after(self, num_drafts: int) -> Draw:
        """The draw of the token after the first `num_drafts` drafts."""
        if not num_drafts:
            return self
        return replace(self, generated=(*self.generated, *self.drafts[:num_drafts]), drafts=())


def draw_of(entry: StepEntry, eos_token_ids: Sequence[int]) -> Draw:
    """The draw of an entry whose `draw` is set."""
    assert entry.draw is not None
    return Draw(entry.draw, entry.generated, eos_token_ids, entry.prompt_ids, entry.drafts)


def sample(
    logits: Tensor,
    draws: Sequence[Draw],
    positions: Sequence[int],
    grammars: Grammars | None = None,
) -> list[tuple[Token, ...]]:
    """Draws one token for each draw, and one more after each right draft.

    A draw with n drafts has n + 1 rows, in order. Each row draws as if the tokens before it had
    been drawn one by one, so no token depends on the drafts. logits: [rows, vocab] float32.
    positions: [draws], the places of the first new tokens in their sequences. grammars: needed by
    draws with structured output. Raises `NonFiniteLogitsError`.
    """
    best_logits, best_ids = logits.max(dim=-1)
    best, values = best_ids.tolist(), best_logits.tolist()
    found: list[tuple[Token, ...]] = []
    first = 0
    for draw, position in zip(draws, positions, strict=True):
        tokens: list[Token] = []
        for number in range(1 + len(draw.drafts)):
            row = first + number
            # The maximum of a row with NaN is NaN.
            if not abs(values[row]) < np.inf:
                raise NonFiniteLogitsError(
                    f"row {row} of the step has logit {values[row]}:"
                    " the weights or the KVCache may be damaged"
                )
            own = draw.after(number)
            if _is_plainly_greedy(own):
                tokens.append(Token(best[row]))
            else:
                raw = logits[row].cpu().numpy().astype(np.float64)
                tokens.append(_draw(raw, own, position + number, _allowed(own, grammars)))
            if number < len(draw.drafts) and tokens[-1].token_id != draw.drafts[number]:
                break
        found.append(tuple(tokens))
        first += 1 + len(draw.drafts)
    assert first == len(values)
    return found


def score(
    logits: Tensor, target_ids: Sequence[int], num_logprobs: Sequence[int]
) -> list[TokenLogprobs]:
    """The logprob of one target per row, and of the most likely tokens. logits: [rows, vocab].

    Raises `NonFiniteLogitsError`.
    """
    scored = []
    for row, target_id, count in zip(logits, target_ids, num_logprobs, strict=True):
        raw = row.cpu().numpy().astype(np.float64)
        if not np.isfinite(raw.max()):
            raise NonFiniteLogitsError(f"a row of the prompt has logit {raw.max()}")
        found = _logprobs(raw, target_id, count)
        scored.append(TokenLogprobs(found.logprob, found.top, _rank(raw, target_id)))
    return scored


def _rank(raw: Row, token_id: int) -> int:
    """The place of a token among all by logit, from 1 on; ties by id."""
    own = raw[token_id]
    return 1 + int((raw > own).sum()) + int((raw[:token_id] == own).sum())


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends only on the arguments (splitmix64, applied twice)."""
    return (_mix(_mix(seed & _MASK) ^ (position & _MASK)) >> 11) / (1 << 53)


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _is_plainly_greedy(draw: Draw) -> bool:
    params = draw.params
    return (
        params.temperature == 0
        and params.logprobs is None
        and len(draw.generated) >= params.min_tokens
        and params.presence_penalty == 0
        and params.frequency_penalty == 0
        and params.repetition_penalty == 1
        and not params.logit_bias
        and not params.grammar
        and not params.allowed_token_ids
        and not params.bad_words
    )


def _allowed(draw: Draw, grammars: Grammars | None) -> Mask | None:
    """Returns [vocab] bool, or None if every token is allowed."""
    grammar = draw.params.grammar
    if not grammar:
        return None
    assert grammars is not None, "engines that serve requests have grammars"
    return grammars.allowed(grammar, draw.generated)


def _draw(raw: Row, draw: Draw, position: int, allowed: Mask | None) -> Token:
    params = draw.params
    row = _masked(_penalised(raw, draw), draw, allowed)
    if params.temperature == 0:
        token_id = int(row.argmax())
    else:
        candidates, weights = _candidates(_scaled(row, params.temperature), params)
        bounds = weights.cumsum()
        place = np.searchsorted(bounds, uniform(params.seed, position) * bounds[-1], side="right")
        token_id = int(candidates[min(int(place), len(candidates) - 1)])
    if params.logprobs is None:
        return Token(token_id)
    return Token(token_id, _logprobs(raw, token_id, params.logprobs, params.logprob_token_ids))


def _penalised(raw: Row, draw: Draw) -> Row:
    """The row [vocab] with logit biases and penalties."""
    params = draw.params
    row = raw.copy()
    for token_id, bias in params.logit_bias:
        row[token_id] += bias
    if params.repetition_penalty != 1:
        seen = np.fromiter(draw.prompt_ids.union(draw.generated), dtype=np.int64)
        seen = seen[(seen >= 0) & (seen < len(row))]
        factor = params.repetition_penalty
        row[seen] = np.where(row[seen] > 0, row[seen] / factor, row[seen] * factor)
    if params.presence_penalty or params.frequency_penalty:
        for token_id, count in Counter(draw.generated).items():
            row[token_id] -= params.presence_penalty + params.frequency_penalty * count
    return row


def _masked(row: Row, draw: Draw, allowed: Mask | None) -> Row:
    """The row [vocab] with -inf for each token that may not be drawn; `row` is overwritten.

    At least one token always remains. If the grammar, the allowed tokens and the bad words leave no
    token, the answer ends, provided that the model has an end token. Until `min_tokens`, end tokens
    are masked only if another token remains.
    """
    params = draw.params
    if allowed is not None or params.allowed_token_ids or params.bad_words:
        kept = row.copy()
        if allowed is not None:
            kept[~allowed] = -np.inf
        if params.allowed_token_ids:
            others = np.ones(len(row), np.bool_)
            others[_within(_id_array(params.allowed_token_ids), row)] = False
            kept[others] = -np.inf
        kept[_completing(draw)] = -np.inf
        if kept.max() == -np.inf:
            ends = _within(draw.eos_token_ids, row)
            kept[ends] = row[ends]
        row = kept if kept.max() > -np.inf else row
    if len(draw.generated) < params.min_tokens:
        early = [*params.stop_token_ids, *(() if params.ignore_eos else draw.eos_token_ids)]
        kept = row.copy()
        kept[_within(early, row)] = -np.inf
        row = kept if kept.max() > -np.inf else row
    return row


def _completing(draw: Draw) -> list[int]:
    """The tokens that would complete a bad word."""
    generated = draw.generated
    found = []
    for word in draw.params.bad_words:
        for *before, last in word.token_ids:
            start = len(generated) - len(before)
            if not before or (start >= 0 and list(generated[start:]) == before):
                found.append(last)
    return found


@lru_cache(KEPT_LISTS)
def _id_array(token_ids: tuple[int, ...]) -> Ids:
    return np.fromiter(token_ids, dtype=np.int64, count=len(token_ids))


def _within(token_ids: Sequence[int] | Ids, row: Row) -> Ids:
    """Returns the ids that the row has: a model may lack tokens of its tokenizer."""
    ids = np.asarray(token_ids, dtype=np.int64)
    return ids[(ids >= 0) & (ids < len(row))]


def _scaled(row: Row, temperature: float) -> Row:
    """The row over the temperature, less its greatest number: 0 and below.

    The difference comes first, because a quotient by a temperature near 0 may be infinite. A
    difference that becomes -inf is correct: such a token is never drawn.
    """
    with np.errstate(over="ignore"):
        scaled: Row = (row - row.max()) / temperature
    return scaled


def _candidates(row: Row, params: SamplingParams) -> tuple[Ids, Row]:
    """The token ids that top_k, top_p and min_p keep, and their weights (not normalised).

    Takes row [vocab], whose greatest number is 0; both results are [candidates].
    """
    if not params.top_k and params.top_p >= 1:
        weights = np.exp(row)
        if params.min_p > 0:
            weights[weights < params.min_p] = 0
        return np.arange(len(row)), weights
    total = float(np.exp(row).sum())
    count = min(params.top_k or FIRST_CANDIDATES, len(row))
    while True:
        ids = largest_ids(row, count)
        weights = np.exp(row[ids])
        if params.top_k:
            # top_p applies to the candidates that top_k keeps, as in vLLM
            total = float(weights.sum())
        kept = _nucleus(weights / total, params.top_p)
        if kept < count or params.top_k or count == len(row):
            break
        count = min(count * 8, len(row))
    ids, weights = ids[:kept], weights[:kept]
    strong = weights >= params.min_p  # the largest weight is 1
    return ids[strong], weights[strong]


def largest_ids(row: Row, count: int) -> Ids:
    """Ids of the `count` largest numbers in falling order; ties by id."""
    ids = np.arange(len(row))
    if count < len(row):
        least = np.partition(row, len(row) - count)[len(row) - count]
        above = np.flatnonzero(row > least)
        ties = np.flatnonzero(row == least)[: count - len(above)]
        ids = np.concatenate([above, ties])
    return ids[np.lexsort((ids, -row[ids]))]


def _nucleus(probabilities: Row, top_p: float) -> int:
    """How many of the falling `probabilities` are needed to reach top_p; at least one."""
    if top_p >= 1:
        return len(probabilities)
    reached = int(np.searchsorted(probabilities.cumsum(), top_p, side="left"))
    return min(reached + 1, len(probabilities))


def _logprobs(raw: Row, token_id: int, count: int, listed: Sequence[int] = ()) -> TokenLogprobs:
    """Logprobs of the model's own distribution, before temperature and penalties, as in OpenAI's
    API. raw: [vocab]. listed: return these tokens and the drawn one instead of the `count` most
    likely."""
    # subtracted first, because beside a great logit the logarithm has no digits
    scaled = raw - raw.max()
    normaliser = np.log(np.exp(scaled).sum())
    if listed:
        top: Ids = np.asarray(list(dict.fromkeys((token_id, *listed))), dtype=np.int64)
    else:
        top = largest_ids(raw, min(count, len(raw))) if count else np.empty(0, dtype=np.int64)
    return TokenLogprobs(
        float(scaled[token_id] - normaliser),
        tuple((int(i), float(scaled[i] - normaliser)) for i in top),
    )
