"""Measures prefills and decode steps of a vLLM server with a few requests, and fits the cost model.

Other load on the server makes the times longer; the Conductor corrects them while it serves.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import statistics
import time
from collections.abc import Sequence

import msgspec

from moonpool.cost.fitted import DecodeSample, FittedCost, PrefillSample, fit_cost
from moonpool.protocol.messages import AttemptId, AttemptSpec
from moonpool.types import SamplingParams, Slo
from moonpool.vllm.client import VllmClient, VllmError
from moonpool.vllm.dialect import DialectError, completion_body, read_output
from moonpool.vllm.facts import VllmFacts
from moonpool.vllm.instance import SubmitRequest

PREFILL_TOKENS = (16, 64, 256, 1024, 4096)
DECODES = ((1, 16), (8, 16), (2, 1024))
"""Batch size, and tokens of each prompt."""
STEPS = 12
PATIENCE_S = 2.0
"""After a prompt that took longer, no longer prompt is measured."""
REPEATS = 2
LEAST_STEP_S = 1e-4
TOKEN_IDS = range(3, 250)
"""Every model has these ids; their meaning does not matter."""
FAR_BYTES_PER_S = 1e-6
"""vLLM fetches blocks by itself and is no source for others. A source this slow is never chosen."""


async def measure(client: VllmClient, facts: VllmFacts) -> FittedCost:
    """Returns the fitted cost model. Raises VllmError, also for a response in another format."""
    longest = max(facts.offer.max_model_tokens - STEPS - 1, 1)
    prefills: list[PrefillSample] = []
    await _first_token_s(client, facts, min(PREFILL_TOKENS[0], longest))  # warms it up
    for number, num_tokens in enumerate((min(PREFILL_TOKENS[0], longest), *PREFILL_TOKENS[1:])):
        if number and (num_tokens > longest or prefills[-1].seconds > PATIENCE_S):
            break
        times_s = [await _first_token_s(client, facts, num_tokens) for _ in range(REPEATS)]
        prefills.append(PrefillSample(num_tokens=num_tokens, cached_tokens=0, seconds=min(times_s)))
    decodes = []
    for batch, num_tokens in DECODES:
        if num_tokens <= min(longest, prefills[-1].num_tokens):
            step_s = await _step_s(client, facts, batch, num_tokens)
            context_tokens = batch * (num_tokens + STEPS // 2)
            decodes.append(DecodeSample(batch=batch, context_tokens=context_tokens, seconds=step_s))
    if not decodes:
        step_s = await _step_s(client, facts, 1, 1)
        decodes.append(DecodeSample(batch=1, context_tokens=1, seconds=step_s))
    cost = fit_cost(prefills, decodes)
    return msgspec.structs.replace(
        cost,
        shared_memory_bytes_per_s=FAR_BYTES_PER_S,
        network_bytes_per_s=FAR_BYTES_PER_S,
    )


async def _first_token_s(client: VllmClient, facts: VllmFacts, num_tokens: int) -> float:
    began_s = time.perf_counter()
    times_s = await _answer(client, facts, num_tokens, 1)
    return times_s[0] - began_s


async def _step_s(client: VllmClient, facts: VllmFacts, batch: int, num_tokens: int) -> float:
    """Returns the time of a step in which all requests decode."""
    runs = (_answer(client, facts, num_tokens, STEPS) for _ in range(batch))
    answers = await asyncio.gather(*runs)
    all_in_s = max(times_s[0] for times_s in answers)
    # Several tokens may arrive at once, so only their total time is meaningful.
    steps_s = []
    for times_s in answers:
        late_s = [time_s for time_s in times_s if time_s >= all_in_s]
        if len(late_s) < 2:  # this request ended before the last one began
            late_s = list(times_s)
        steps_s.append((late_s[-1] - late_s[0]) / max(len(late_s) - 1, 1))
    return max(statistics.median(steps_s), LEAST_STEP_S)


async def _answer(
    client: VllmClient, facts: VllmFacts, num_tokens: int, max_tokens: int
) -> Sequence[float]:
    """Returns the arrival time of each token of one request."""
    token_ids = tuple(random.choice(TOKEN_IDS) for _ in range(num_tokens))
    work = _lone_work(f"measure-{secrets.token_hex(6)}", token_ids, max_tokens)
    times_s: list[float] = []
    body = completion_body(SubmitRequest(work), facts.model_id, b"")
    async for event in client.answer(body, streamed=True):
        try:
            output = read_output(work, event)
        except DialectError as error:
            raise VllmError(str(error)) from None
        times_s.extend([time.perf_counter()] * len(output.tokens))
    if not times_s:
        raise VllmError(f"it generated no token for a prompt of {num_tokens} tokens")
    return times_s


def _lone_work(attempt_id: str, token_ids: tuple[int, ...], max_tokens: int) -> AttemptSpec:
    """Returns an attempt to measure: greedy, of fixed length, and outside the prefix cache."""
    return AttemptSpec(
        attempt_id=AttemptId(attempt_id),
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, min_tokens=max_tokens
        ),
        slo=Slo(ttft_s=float("inf"), tbt_s=float("inf")),
        tenant="",
        use_cache=False,
        timeout_s=600.0,
    )
