from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moonpool.api.metrics import Prediction, PrometheusHistogram, ServerMetrics


def samples(metrics: ServerMetrics) -> dict[tuple[str, str], float]:
    """(sample name, the label besides the model's) -> value."""
    found = {}
    for family in text_string_to_metric_families(metrics.text().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("model_name", "tiny"), labels.pop("engine")) == ("tiny", "0")
            found[sample.name, ",".join(f"{k}={v}" for k, v in sorted(labels.items()))] = (
                sample.value
            )
    return found


def test_a_new_server_shows_its_plain_series_at_zero() -> None:
    found = samples(ServerMetrics("tiny"))

    assert found["vllm:num_requests_running", ""] == 0
    assert found["vllm:prompt_tokens_total", ""] == 0
    assert found["vllm:time_to_first_token_seconds_count", ""] == 0
    assert found["moonpool:corrupt_slices_total", ""] == 0


def test_what_the_head_observes_is_what_prometheus_reads() -> None:
    metrics = ServerMetrics("tiny")
    metrics.observe_prompt(100, 64)
    metrics.observe_first_token(0.3)
    metrics.observe_tokens(3, (0.004, 0.2))
    metrics.observe_finished(
        "stop", e2e_s=0.6, generation_tokens=3, tpot_s=0.1, stages_s={"queue": 0.1}
    )
    metrics.observe_rejected("ttft_slo")
    metrics.observe_failed("deadline")
    metrics.add_transfer("shm", 4096, 2)
    metrics.add_corrupt_slices()
    metrics.add_recomputed_tokens(16)
    metrics.set_load(running=2, waiting=5, cache_use=0.25)
    metrics.set_instances({"prefill": 2})
    metrics.observe_prefill(0.5, 32, wasted=False)
    metrics.observe_prefill(0.25, 0, wasted=True)
    metrics.add_step_seconds("prefill", 1.5)
    metrics.add_transfer_seconds(0.125)
    metrics.set_pool_loads({"decode": 0.75})
    metrics.set_predictions({"ttft_s": Prediction(7, 0.5, 0.25, 1.1, 1.4)})
    metrics.set_learned({"prefill": {"prefill-0": 2.0}})

    found = samples(metrics)

    assert found["moonpool:prefill_seconds_total", ""] == 0.75
    assert found["moonpool:wasted_prefill_seconds_total", ""] == 0.25
    assert found["moonpool:wasted_prefills_total", ""] == 1
    assert found["moonpool:fetched_tokens_total", ""] == 32
    assert found["moonpool:step_seconds_total", "role=prefill"] == 1.5
    assert found["moonpool:transfer_seconds_total", ""] == 0.125
    assert found["moonpool:pool_load", "pool=decode"] == 0.75

    assert found["vllm:prompt_tokens_total", ""] == 100
    assert found["vllm:prefix_cache_queries_total", ""] == 100
    assert found["vllm:prefix_cache_hits_total", ""] == 64
    assert found["vllm:generation_tokens_total", ""] == 3
    assert found["vllm:request_success_total", "finished_reason=stop"] == 1
    assert found["vllm:time_to_first_token_seconds_sum", ""] == pytest.approx(0.3)
    assert found["vllm:inter_token_latency_seconds_count", ""] == 2
    assert found["vllm:inter_token_latency_seconds_bucket", "le=0.005"] == 1
    assert found["vllm:e2e_request_latency_seconds_count", ""] == 1
    assert found["vllm:num_requests_waiting", ""] == 5
    assert found["vllm:kv_cache_usage_perc", ""] == 0.25
    assert found["moonpool:stage_seconds_count", "stage=queue"] == 1
    assert found["moonpool:predictions_total", "quantity=ttft_s"] == 7
    assert found["moonpool:predictions_too_much_total", "quantity=ttft_s"] == 0.5
    assert found["moonpool:predictions_too_little_total", "quantity=ttft_s"] == 0.25
    assert found["moonpool:prediction_ratio_p50", "quantity=ttft_s"] == 1.1
    assert found["moonpool:prediction_ratio_p90", "quantity=ttft_s"] == 1.4
    assert found["moonpool:learned_prefill_factor", "instance=prefill-0"] == 2.0
    assert found["moonpool:requests_rejected_total", "reason=ttft_slo"] == 1
    assert found["moonpool:requests_failed_total", "reason=deadline"] == 1
    assert found["moonpool:transfer_bytes_total", "transport=shm"] == 4096
    assert found["moonpool:transfers_total", "transport=shm"] == 2
    assert found["moonpool:corrupt_slices_total", ""] == 1
    assert found["moonpool:recomputed_tokens_total", ""] == 16
    assert found["moonpool:instances", "role=prefill"] == 2


def test_a_sample_on_a_bound_counts_as_within_it() -> None:
    histogram = PrometheusHistogram((1.0, 2.0))
    histogram.observe_all((1.0, 1.5, 3.0))

    assert histogram.buckets() == [("1.0", 1.0), ("2.0", 2.0), ("+Inf", 3.0)]
    assert histogram.sum == 5.5


def test_labels_survive_quotes_and_newlines() -> None:
    metrics = ServerMetrics("tiny")
    metrics.observe_rejected('a"b\nc')

    assert samples(metrics)["moonpool:requests_rejected_total", 'reason=a"b\nc'] == 1
