"""Judges answers with a vLLM without a pool or any cache, which scores each of their tokens.

A greedy answer is right if each of its tokens is the likeliest next token, or nearly as likely,
because rounding, which depends on the batch, decides between tokens that are about equally likely.
So an answer that chose another token there is still judged to its end.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import httpx
import msgspec

PATH = "/v1/completions"
JUDGE_S = 300.0


class TokenAnswer(msgspec.Struct):
    """A prompt and its answer, as tokens of the model."""

    name: str
    model: str
    prompt: list[int]
    tokens: list[int]
    text: str = ""
    foreign: list[str] = []
    """Codes of other conversations in the text."""


class Judgement(msgspec.Struct, frozen=True):
    """The largest difference, in nats, between the log-probability of a token and that of the
    likeliest token at its position."""

    answer: TokenAnswer
    gap_nats: float
    at_token: int

    def is_wrong(self, tie_nats: float) -> bool:
        return self.gap_nats > tie_nats or bool(self.answer.foreign)


def judge(urls: Mapping[str, str], answers: Iterable[TokenAnswer]) -> list[Judgement]:
    """Judges one answer after the other. `urls`: the vLLM of each model. Raises httpx.HTTPError."""
    known: dict[tuple[Any, ...], tuple[float, int]] = {}
    found = []
    with httpx.Client(timeout=JUDGE_S) as http:
        for answer in answers:
            key = (answer.model, tuple(answer.prompt), tuple(answer.tokens))
            if key not in known:
                known[key] = _gap(http, urls[answer.model], answer)
            found.append(Judgement(answer, *known[key]))
    return found


def _gap(http: httpx.Client, url: str, answer: TokenAnswer) -> tuple[float, int]:
    if not answer.tokens:
        return 0.0, 0
    body = {
        "model": answer.model,
        "prompt": answer.prompt + answer.tokens,
        "prompt_logprobs": 1,
        "max_tokens": 1,
        "temperature": 0,
    }
    reply = http.post(f"{url}{PATH}", json=body)
    reply.raise_for_status()
    places = reply.json()["choices"][0]["prompt_logprobs"][len(answer.prompt) :]
    gaps = [_gap_of(place, token) for place, token in zip(places, answer.tokens, strict=True)]
    worst = max(range(len(gaps)), key=gaps.__getitem__)
    return gaps[worst], worst


def _gap_of(place: Mapping[str, Mapping[str, float]], token: int) -> float:
    likeliest = max(each["logprob"] for each in place.values())
    return likeliest - place[str(token)]["logprob"]


def counts_of(verdicts: Iterable[Judgement], tie_nats: float) -> dict[str, Any]:
    """Returns how many answers of a phase are of each kind. `near_ties` are right, but not the
    likeliest throughout."""
    judged = list(verdicts)
    wrong = [one for one in judged if one.is_wrong(tie_nats)]
    gaps = [one.gap_nats for one in judged if not one.is_wrong(tie_nats)]
    return {
        "answers": len(judged),
        "wrong": len(wrong),
        "foreign": sum(bool(one.answer.foreign) for one in judged),
        "near_ties": sum(gap > 0.0 for gap in gaps),
        "widest_near_tie_nats": max(gaps, default=0.0),
        "examples": [
            {
                "question": one.answer.name,
                "gap_nats": one.gap_nats,
                "at_token": one.at_token,
                "foreign": one.answer.foreign,
                "answer": one.answer.text,
            }
            for one in wrong[:20]
        ],
    }
