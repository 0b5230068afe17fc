"""Draws requests that share prefixes, like the turns of conversations."""

from __future__ import annotations

import random

from moonpool.types import Request, RequestId, SamplingParams, Slo
from tests.sim.options import Options
from tests.sim.truth import VOCABULARY, Truth, find_truth

SHORT_DEADLINE_S = 0.5
LONG_DEADLINE_S = 1000.0


def make_workload(options: Options, rng: random.Random) -> list[tuple[Truth, float]]:
    """Returns each request with its correct answer, and its arrival time."""
    documents = [("", _tokens(rng, options.max_prompt_tokens // 2)) for _ in range(2)]
    work: list[tuple[Truth, float]] = []
    for number in range(options.num_requests):
        at_s = (number + rng.random()) / options.num_requests * options.arrivals_s
        truth = find_truth(_request(options, rng, number, documents, at_s))
        # The next turn of a conversation begins with the prompt and the answer of this turn.
        if rng.random() < 0.5:
            documents.append((truth.request.tenant, truth.tokens))
        work.append((truth, at_s))
    return work


def _tokens(rng: random.Random, count: int) -> tuple[int, ...]:
    return tuple(rng.randrange(VOCABULARY) for _ in range(count))


def _request(
    options: Options,
    rng: random.Random,
    number: int,
    documents: list[tuple[str, tuple[int, ...]]],
    at_s: float,
) -> Request:
    tenant, document = rng.choice(documents[-options.num_recent :])
    if rng.random() < 0.2:
        tenant = rng.choice(("", "a", "b"))
    prompt = document[: options.max_prompt_tokens]
    if rng.random() < 0.3:
        prompt = prompt[: rng.randint(0, len(prompt))]
    num_new = rng.randint(1, 4) if prompt else rng.randint(1, options.max_prompt_tokens // 2)
    prompt += _tokens(rng, min(num_new, options.max_prompt_tokens - len(prompt)))
    priority = 0
    if options.tenants:  # the first tenant sends most of the requests
        names = [name for name, _ in options.tenants]
        tenant = names[0] if rng.random() < 0.5 else rng.choice(names)
        tenant += rng.choice(("", "", "/salt"))
        priority = rng.choice((0, 0, -1, 3))
    tight = rng.random() < options.tight_slo_rate
    short = rng.random() < options.short_deadline_rate
    return Request(
        request_id=RequestId(f"r{number}"),
        token_ids=prompt,
        sampling=SamplingParams(
            temperature=0.0 if options.engine == "vllm" else 1.0,
            seed=rng.randrange(1000),
            max_tokens=rng.randint(1, options.max_answer_tokens),
            min_tokens=rng.choice((0, 0, 2)),
            ignore_eos=rng.random() < 0.3,
            stop_token_ids=(5, 6, 7) if rng.random() < 0.3 else (),
        ),
        slo=Slo(
            ttft_s=rng.choice((0.01, 0.1, 0.5)) if tight else 1e6,
            tbt_s=rng.choice((0.008, 0.012)) if tight else 1e6,
        ),
        arrived_s=at_s,
        deadline_s=at_s + (rng.random() * SHORT_DEADLINE_S if short else LONG_DEADLINE_S),
        tenant=tenant,
        priority=priority,
        use_cache=rng.random() < 0.9,
    )
