"""Returns how much the metrics of a played cluster must grow by an act, or by a request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from played_head import (
    Burst,
    Play,
    PlayedCluster,
    Step,
    moved,
    played,
)

from moonpool.api.serving_backend import ApiOptions
from moonpool.protocol.messages import AttemptSpec
from moonpool.types import FinishReason

TIME = "time"
"""Stands for an amount of seconds, which differs from run to run."""
PATIENCE_S = 60.0
STAGES = ("placement", "queue_and_fetch", "prefill", "handover", "decode")
Act = Callable[[PlayedCluster], Awaitable[Any]]


def grown(act: Act, play: Play, options: ApiOptions | None = None, **known: Any) -> dict[str, Any]:
    """Returns the metrics that an act has changed and by how much, with TIME in place of
    seconds."""

    async def run() -> dict[str, Any]:
        async with played(play, options, **known) as cluster:
            before = cluster.samples()
            await act(cluster)
            for _ in range(3):
                await asyncio.sleep(0)
            found = moved(before, cluster.samples())
        return {
            name: TIME if "seconds" in name and "_count" not in name else value
            for name, value in found.items()
            if not name.startswith(("process_", "moonpool:predictions"))
        }

    return asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def first_token(prompt: int, requests: int = 1) -> dict[str, Any]:
    """Returns the growth for requests that have a first token, with prompts of this many tokens
    that no cache has."""
    tokens = float(prompt * requests)
    return {
        "vllm:time_to_first_token_seconds_count": float(requests),
        "vllm:time_to_first_token_seconds_sum": TIME,
        "vllm:prompt_tokens_total": tokens,
        "vllm:prompt_tokens_by_source_total{source=local_compute}": tokens,
        "vllm:prefix_cache_queries_total": tokens,
        "vllm:request_prompt_tokens_count": float(requests),
        "vllm:request_prompt_tokens_sum": tokens,
        "vllm:request_prefill_kv_computed_tokens_count": float(requests),
        "vllm:request_prefill_kv_computed_tokens_sum": tokens,
    }


def timed(name: str, count: int, suffix: str = "") -> dict[str, Any]:
    return {f"{name}_count{suffix}": float(count), f"{name}_sum{suffix}": TIME}


def answers(
    prompt: int, length: int, requests: int = 1, reason: str = "length", limit: int | None = None
) -> dict[str, Any]:
    """Returns the growth for complete answers of this length to prompts of this length."""
    found = first_token(prompt, requests) | {
        f"vllm:request_success_total{{finished_reason={reason}}}": float(requests),
        "vllm:generation_tokens_total": float(length * requests),
        "vllm:request_generation_tokens_count": float(requests),
        "vllm:request_generation_tokens_sum": float(length * requests),
        "vllm:request_params_max_tokens_count": float(requests),
        "vllm:request_params_max_tokens_sum": float((limit or length) * requests),
        "vllm:request_params_n_count": 1.0,
        "vllm:request_params_n_sum": float(requests),
        "vllm:request_max_num_generation_tokens_count": 1.0,
        "vllm:request_max_num_generation_tokens_sum": float(length),
        "moonpool:prefill_seconds_total": TIME,
    }
    for name in (
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
        "vllm:request_inference_time_seconds",
    ):
        found |= timed(name, requests)
    if length > 1:
        found |= timed("vllm:inter_token_latency_seconds", (length - 1) * requests)
        found |= timed("vllm:request_time_per_output_token_seconds", requests)
    for stage in STAGES:
        found |= timed("moonpool:stage_seconds", requests, f"{{stage={stage}}}")
    return found


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Asserts that both are equal. A sum of seconds may also be unchanged, because the time may
    have been 0."""
    for name in [name for name in expected if expected[name] is TIME and name not in found]:
        del expected[name]
    assert found == expected


def says(text: str, seconds: float = 0.02) -> Play:
    """Returns a request whose answer is this text, one letter after the other, up to the limit."""

    def play(attempt: AttemptSpec) -> Sequence[Step]:
        steps: list[Step] = [0.0, seconds]
        for number, letter in enumerate(text):
            last = FinishReason.LENGTH if number == len(text) - 1 else None
            steps += [Burst(letter, last), 0.001]
        return steps

    return play


def post(path: str = "/v1/completions", **body: Any) -> Act:
    async def act(cluster: PlayedCluster) -> None:
        whole = body if "input" in body else {"prompt": "Hi", **body}
        response = await cluster.http.post(path, json=whole)
        assert response.status_code == 200, response.text

    return act
