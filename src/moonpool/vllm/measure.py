"""Measures prefills and decode steps of a server with a few requests, and fits the cost model.

Until the times are measured, the Conductor uses assumed times for the server. Each request waits
for a moment without other requests, which would make the times longer. What other requests cost,
the Conductor learns while it serves.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from moonpool.cost.fitted import DecodeSample, FittedCost, PrefillSample, fit_cost
from moonpool.protocol.messages import AttemptId, AttemptSpec
from moonpool.types import SamplingParams, Slo
from moonpool.vllm.actions import SubmitRequest
from moonpool.vllm.client import VllmClient, VllmError
from moonpool.vllm.dialect import DialectError, completion_body, read_output
from moonpool.vllm.dialects.server_dialect import ServerDialect
from moonpool.vllm.facts import VllmFacts
from moonpool.vllm.instance import NO_HANDLE

log = logging.getLogger("moonpool.vllm")

PREFILL_TOKENS = (16, 64, 256, 1024, 4096)
DECODES = ((1, 16), (8, 16), (2, 1024))
"""Batch size, and tokens of each prompt."""
STEPS = 12
PATIENCE_S = 2.0
"""After a prompt that took longer than this, no longer prompt is measured."""
REPEATS = 2
LEAST_STEP_S = 1e-4
TOKEN_IDS = range(3, 250)
"""Every model has these ids; their meaning does not matter."""
FAR_BYTES_PER_S = 1e-6
"""vLLM itself fetches blocks, and is not a source for other instances. A source this slow is never
chosen."""
QUIET_S, QUIET_LOOK_S = 30.0, 0.02
"""How long a request waits at most for a moment without other requests, and the time between two
checks."""
ASSUMED_COST = FittedCost(
    prefill=(0.02, 1e-4, 0.0, 0.0),
    decode=(0.02, 2e-4, 1e-8),
    shared_memory_bytes_per_s=FAR_BYTES_PER_S,
    network_bytes_per_s=FAR_BYTES_PER_S,
)
"""The assumed cost: a model of 8 billion parameters on a GPU. Times that are too short refuse
nothing."""
INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "/v1/embeddings": lambda prompt: {"input": prompt},
    "/pooling": lambda prompt: {"input": prompt},
    "/classify": lambda prompt: {"input": prompt},
    "/v1/score": lambda prompt: {"text_1": "a", "text_2": "a " * (len(prompt) - 1)},
    "/score": lambda prompt: {"text_1": "a", "text_2": "a " * (len(prompt) - 1)},
}
"""Fields of a call with a prompt of token ids, or of about as many words."""

SAY_S = 5.0
"""How often progress is logged."""

FirstToken = Callable[[int], Awaitable[float]]


class MeasureProgress:
    """Logs every few seconds what is being measured."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._what = ""

    def note(self, what: str) -> None:
        self._what = what

    async def say(self) -> None:
        """Runs until cancelled."""
        seconds = 0.0
        while True:
            await asyncio.sleep(SAY_S)
            seconds += SAY_S
            log.info(
                "measuring %s for %.0f s, now %s; meanwhile it serves by assumed times",
                self._url,
                seconds,
                self._what,
            )


async def probe(dialect: ServerDialect, facts: VllmFacts, hands_over: bool = False) -> None:
    """Asks for one short answer. `hands_over`: whether another server shall also take over its
    KVCache. Raises VllmError if the server cannot give it in a form that is understood."""
    if hands_over:
        await _check_connector(dialect.client, facts)
        return
    await _prompts_of(dialect, facts)(min(PREFILL_TOKENS[0], facts.offer.max_model_tokens - 1))


async def measure(
    dialect: ServerDialect,
    facts: VllmFacts,
    is_quiet: Callable[[], bool],
    note: Callable[[str], None],
) -> FittedCost:
    """Returns the fitted cost model. `is_quiet`: whether there are no other requests. `note` is
    told what is measured next. Raises VllmError, for a response in another format too."""

    async def begin(what: str) -> None:
        note(what)
        for _ in range(int(QUIET_S / QUIET_LOOK_S)):
            if is_quiet():
                break
            await asyncio.sleep(QUIET_LOOK_S)

    longest = max(facts.offer.max_model_tokens - STEPS - 1, 1)
    first_token_s = _prompts_of(dialect, facts)
    prefills: list[PrefillSample] = []
    for num_tokens in (min(PREFILL_TOKENS[0], longest), *PREFILL_TOKENS[1:]):
        if prefills and (num_tokens > longest or prefills[-1].seconds > PATIENCE_S):
            break
        times_s = []
        for _ in range(REPEATS):
            await begin(f"a prompt of {num_tokens} tokens")
            times_s.append(await first_token_s(num_tokens))
        prefills.append(PrefillSample(num_tokens=num_tokens, cached_tokens=0, seconds=min(times_s)))
    decodes = []
    most_tokens = min(longest, prefills[-1].num_tokens)
    for batch, num_tokens in DECODES if facts.offer.generates else ():
        if num_tokens <= most_tokens:
            await begin(f"{batch} answers to {num_tokens} tokens")
            step_s = await _step_s(dialect, facts, batch, num_tokens)
            context_tokens = batch * (num_tokens + STEPS // 2)
            decodes.append(DecodeSample(batch=batch, context_tokens=context_tokens, seconds=step_s))
    if not decodes:
        step_s = await _step_s(dialect, facts, 1, 1) if facts.offer.generates else LEAST_STEP_S
        decodes.append(DecodeSample(batch=1, context_tokens=1, seconds=step_s))
    return msgspec.structs.replace(
        fit_cost(prefills, decodes),
        shared_memory_bytes_per_s=FAR_BYTES_PER_S,
        network_bytes_per_s=FAR_BYTES_PER_S,
    )


async def _check_connector(client: VllmClient, facts: VllmFacts) -> None:
    """Raises VllmError if a prefill brings no handle of its KVCache."""
    num_tokens = min(2 * facts.block_tokens + 1, max(facts.offer.max_model_tokens - 1, 1))
    work = _lone_work(f"measure-{secrets.token_hex(6)}", _random_prompt(num_tokens), 1)
    context = facts.offer.max_model_tokens
    body = completion_body(SubmitRequest(work, hands_over=True), facts.model_id, context, b"")
    handle = b""
    async for event in client.answer(body, streamed=False):
        try:
            handle = read_output(work, event).handle or handle
        except DialectError as error:
            raise VllmError(str(error)) from None
    if not handle:
        raise VllmError(NO_HANDLE)


def describe_cost(cost: FittedCost) -> str:
    """Returns one line for the log."""
    prompt_s, step_s = cost.prefill_s(1024, 0), cost.decode_step_s(8, 8 * 1024)
    prompt = f"a prompt of 1,024 tokens takes {prompt_s:.3f} s"
    return f"{prompt}, a step of 8 answers {step_s * 1e3:.1f} ms"


def _prompts_of(dialect: ServerDialect, facts: VllmFacts) -> FirstToken:
    """Returns a function that computes a prompt of this many tokens and returns the seconds."""
    if facts.offer.generates:
        return lambda num_tokens: _first_token_s(dialect, facts, num_tokens)
    path = next((path for path in INPUTS if path in facts.offer.paths), "")
    if not path:
        raise VllmError(f"its endpoints {', '.join(facts.offer.paths)} are not understood")
    return lambda num_tokens: _pooled_s(dialect.client, facts, path, num_tokens)


async def _first_token_s(dialect: ServerDialect, facts: VllmFacts, num_tokens: int) -> float:
    began_s = time.perf_counter()
    times_s = await _answer(dialect, facts, num_tokens, 1)
    return times_s[0] - began_s


async def _pooled_s(client: VllmClient, facts: VllmFacts, path: str, num_tokens: int) -> float:
    fields = INPUTS[path](_random_prompt(num_tokens)) | {"model": facts.model_id}
    began_s = time.perf_counter()
    async for _ in client.forward(path, msgspec.json.encode(fields)):
        pass
    return time.perf_counter() - began_s


async def _step_s(dialect: ServerDialect, facts: VllmFacts, batch: int, num_tokens: int) -> float:
    """Returns the time of a step in which all requests decode."""
    runs = (_answer(dialect, facts, num_tokens, STEPS) for _ in range(batch))
    answers = await asyncio.gather(*runs)
    all_in_s = max(times_s[0] for times_s in answers)
    # Several tokens may arrive at once, so only their total time is meaningful.
    steps_s = []
    for times_s in answers:
        late_s = [time_s for time_s in times_s if time_s >= all_in_s]
        if len(late_s) < 2:  # this request ended before the last one had begun
            late_s = list(times_s)
        steps_s.append((late_s[-1] - late_s[0]) / max(len(late_s) - 1, 1))
    return max(statistics.median(steps_s), LEAST_STEP_S)


async def _answer(
    dialect: ServerDialect, facts: VllmFacts, num_tokens: int, max_tokens: int
) -> Sequence[float]:
    """Returns the arrival time of each token of one request."""
    work = _lone_work(f"measure-{secrets.token_hex(6)}", _random_prompt(num_tokens), max_tokens)
    times_s: list[float] = []
    try:
        async for output in dialect.outputs(SubmitRequest(work), facts, b""):
            times_s.extend([time.perf_counter()] * len(output.tokens))
    except DialectError as error:
        raise VllmError(str(error)) from None
    if not times_s:
        raise VllmError(f"it generated no token for a prompt of {num_tokens} tokens")
    return times_s


def _random_prompt(num_tokens: int) -> tuple[int, ...]:
    return tuple(random.choice(TOKEN_IDS) for _ in range(num_tokens))


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
