"""What a vLLM's prompts and steps take, as seen from here: a few requests, for the cost model's
fit. What it serves meanwhile makes them slower; the Conductor learns the rest as it goes."""

from __future__ import annotations

import asyncio
import random
import secrets
import statistics
import time
from collections.abc import Sequence

import msgspec

from moonpool.cost.fitted import DecodeSample, FittedCost, PrefillSample, fit_cost
from moonpool.types import SamplingParams, Slo
from moonpool.vllm.client import VllmClient, VllmError
from moonpool.vllm.dialect import DialectError, Facts, completion_body, read_piece
from moonpool.workers.guest import Ask
from moonpool.workers.messages import Work, WorkId

PREFILL_TOKENS = (16, 64, 256, 1024, 4096)
DECODES = ((1, 16), (8, 16), (2, 1024))
"""Batch, and tokens of each prompt."""
STEPS = 12
PATIENCE_S = 2.0
"""After a prompt that took so long, none longer is tried."""
REPEATS = 2
LEAST_STEP_S = 1e-4
TOKEN_IDS = range(3, 250)
"""Any model has these; what they mean does not matter."""
FAR_BYTES_PER_S = 1e-6
"""No block can be had from it: vLLM fetches by itself. So slow a source is never chosen."""


async def measure(client: VllmClient, facts: Facts) -> FittedCost:
    """Raises VllmError, also where it does not answer as vLLM does."""
    longest = max(facts.max_model_tokens - STEPS - 1, 1)
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


async def _first_token_s(client: VllmClient, facts: Facts, num_tokens: int) -> float:
    began_s = time.perf_counter()
    times_s = await _answer(client, facts, num_tokens, 1)
    return times_s[0] - began_s


async def _step_s(client: VllmClient, facts: Facts, batch: int, num_tokens: int) -> float:
    """Of a step in which all of them decode."""
    asked = (_answer(client, facts, num_tokens, STEPS) for _ in range(batch))
    answers = await asyncio.gather(*asked)
    all_in_s = max(times_s[0] for times_s in answers)
    # Several tokens may come at once: only the time that all of them took tells.
    steps_s = []
    for times_s in answers:
        late_s = [time_s for time_s in times_s if time_s >= all_in_s]
        if len(late_s) < 2:  # it ended before the last began
            late_s = list(times_s)
        steps_s.append((late_s[-1] - late_s[0]) / max(len(late_s) - 1, 1))
    return max(statistics.median(steps_s), LEAST_STEP_S)


async def _answer(
    client: VllmClient, facts: Facts, num_tokens: int, max_tokens: int
) -> Sequence[float]:
    """When each of its tokens came."""
    token_ids = tuple(random.choice(TOKEN_IDS) for _ in range(num_tokens))
    work = _lone_work(f"measure-{secrets.token_hex(6)}", token_ids, max_tokens)
    times_s: list[float] = []
    body = completion_body(Ask(work), facts.model_id, b"")
    async for event in client.answer(body, streamed=True):
        try:
            piece = read_piece(work, event)
        except DialectError as error:
            raise VllmError(str(error)) from None
        times_s.extend([time.perf_counter()] * len(piece.tokens))
    if not times_s:
        raise VllmError(f"it answered a prompt of {num_tokens} tokens with none")
    return times_s


def _lone_work(work_id: str, token_ids: tuple[int, ...], max_tokens: int) -> Work:
    """One that measures: greedy, to the last token, and nobody's cache."""
    return Work(
        work_id=WorkId(work_id),
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
