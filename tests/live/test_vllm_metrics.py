"""The server exports the metrics, with the values, that vLLM's own test of its server expects."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.live.waiting import wait_until, wait_until_idle

REQUESTS = MAX_TOKENS = 10
PROMPT = [*range(1, 11)]
HISTOGRAMS = (
    "vllm:request_prompt_tokens",
    "vllm:request_generation_tokens",
    "vllm:request_params_n",
    "vllm:request_params_max_tokens",
    "vllm:time_to_first_token_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:e2e_request_latency_seconds",
    "vllm:request_queue_time_seconds",
    "vllm:request_inference_time_seconds",
    "vllm:request_prefill_time_seconds",
    "vllm:request_decode_time_seconds",
    "vllm:request_num_preemptions",
)
EXPECTED = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:num_requests_waiting_by_reason",
    "vllm:kv_cache_usage_perc",
    "vllm:prefix_cache_queries",
    "vllm:prefix_cache_hits",
    "vllm:num_preemptions_total",
    "vllm:admission_rejections_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:iteration_tokens_total",
    "vllm:cache_config_info",
    "vllm:request_success_total",
    *(f"{name}_{part}" for name in HISTOGRAMS for part in ("sum", "bucket", "count")),
)
"""Copies `EXPECTED_METRICS_V1` of `serve/instrumentator/test_metrics` in the tests of vLLM 0.33."""
VALUES = {
    "vllm:time_to_first_token_seconds_count": REQUESTS,
    "vllm:inter_token_latency_seconds_count": REQUESTS * (MAX_TOKENS - 1),
    "vllm:e2e_request_latency_seconds_count": REQUESTS,
    "vllm:request_queue_time_seconds_count": REQUESTS,
    "vllm:request_inference_time_seconds_count": REQUESTS,
    "vllm:request_prefill_time_seconds_count": REQUESTS,
    "vllm:request_decode_time_seconds_count": REQUESTS,
    "vllm:request_num_preemptions_count": REQUESTS,
    "vllm:request_prompt_tokens_sum": REQUESTS * len(PROMPT),
    "vllm:request_prompt_tokens_count": REQUESTS,
    "vllm:request_generation_tokens_sum": REQUESTS * MAX_TOKENS,
    "vllm:request_generation_tokens_count": REQUESTS,
    "vllm:request_params_n_count": REQUESTS,
    "vllm:request_params_max_tokens_sum": REQUESTS * MAX_TOKENS,
    "vllm:request_params_max_tokens_count": REQUESTS,
    "vllm:iteration_tokens_total_sum": REQUESTS * (len(PROMPT) + MAX_TOKENS),
    "vllm:iteration_tokens_total_count": REQUESTS * MAX_TOKENS,
    "vllm:prompt_tokens_total": REQUESTS * len(PROMPT),
    "vllm:generation_tokens_total": REQUESTS * MAX_TOKENS,
    "vllm:request_success_total": REQUESTS,
}
"""Copies `_get_expected_values` of the same file."""


def samples(http: httpx.Client) -> dict[str, float]:
    """Returns sums over labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def test_every_name_is_there(http: httpx.Client) -> None:
    text = http.get("/metrics").text
    assert [name for name in EXPECTED if name not in text] == []
    (info,) = (
        family.samples
        for family in text_string_to_metric_families(text)
        if family.name == "vllm:cache_config_info"
    )
    for label in ("kv_cache_size_tokens", "kv_cache_max_concurrency"):
        assert float(info[0].labels[label]) > 0


def test_the_values_are_those_that_vllm_expects(http: httpx.Client) -> None:
    wait_until_idle(http)  # until the requests of earlier tests have ended
    before = samples(http)
    for _ in range(REQUESTS):
        body = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "ignore_eos": True}
        assert http.post("/v1/completions", json=body).status_code == 200

    def grown() -> dict[str, float]:
        after = samples(http)
        return {name: after[name] - before.get(name, 0.0) for name in VALUES}

    # Most counts of instances arrive with the last tokens of a request.
    wait_until(lambda: all(count >= VALUES[name] for name, count in grown().items()), f"{VALUES}")
    assert grown() == VALUES


def test_gauges_are_zero_after_an_abort(http: httpx.Client) -> None:
    """Repeats vLLM's `test_abort_metrics_reset`."""

    def gauges() -> tuple[float, float, float]:
        found = samples(http)
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        running, waiting, usage = (found[f"vllm:{name}"] for name in names)
        return running, waiting, usage

    body = {"prompt": PROMPT, "max_tokens": 4000, "ignore_eos": True}
    with pytest.raises(httpx.TimeoutException):
        http.post("/v1/completions", json=body, timeout=0.3)
    wait_until(lambda: gauges() == (0, 0, 0))
