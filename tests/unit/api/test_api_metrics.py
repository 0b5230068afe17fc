from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from moonpool.api.metrics.catalogue import CATALOGUE, HISTOGRAMS
from moonpool.api.metrics.server_metrics import PrometheusHistogram, ServerMetrics
from moonpool.api.models.metrics_text import metrics_text
from moonpool.protocol.instance_counters import STEP_TOKENS, CountedHistogram


def samples(metrics: ServerMetrics) -> dict[tuple[str, str], float]:
    """Maps (sample name, the label besides the model's) to its value."""
    found = {}
    for family in text_string_to_metric_families(metrics_text([metrics]).decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if not family.name.startswith("process_"):
                own = (labels.pop("model_name", "tiny"), labels.pop("engine"))
                assert own == ("tiny", "0")
            found[sample.name, ",".join(f"{k}={v}" for k, v in sorted(labels.items()))] = (
                sample.value
            )
    return found


def test_a_new_server_shows_its_series_at_zero() -> None:
    found = samples(ServerMetrics("tiny"))
    assert all(value == 0 for (name, _), value in found.items() if "process_" not in name)
    for spec in CATALOGUE:
        if spec.kind == "histogram":
            names = {(f"{spec.name}_count", ""), (f"{spec.name}_sum", "")}
            assert spec.label or names <= set(found)
        elif not spec.label:
            assert (spec.exported_name, "") in found
        for value in spec.known:
            assert (spec.exported_name, f"{spec.label}={value}") in found


def test_a_restart_of_the_process_is_seen() -> None:
    assert samples(ServerMetrics("tiny"))["process_start_time_seconds", ""] > 1e9


def test_names_are_unique_and_say_their_unit() -> None:
    names = [spec.name for spec in CATALOGUE]
    assert len(set(names)) == len(names)
    assert all(name.startswith(("vllm:", "moonpool:")) for name in names)
    for spec in CATALOGUE:
        assert spec.meaning.endswith(".") and spec.meaning[0].isupper(), spec.name
        assert spec.raised_by and not spec.raised_by.endswith("."), spec.name
        assert "seconds" in spec.name or not spec.meaning.startswith("Seconds"), spec.name
        assert list(spec.bounds) == sorted(set(spec.bounds))


def test_what_the_head_pushes_is_what_prometheus_reads() -> None:
    metrics = ServerMetrics("tiny")
    metrics.add("vllm:prompt_tokens", 100)
    metrics.add("moonpool:requests_rejected", label="ttft_slo")
    metrics.add("moonpool:requests_rejected", label="another one")
    metrics.set("vllm:num_requests_waiting", 5)
    metrics.set_all("moonpool:instances", {"prefill": 2})
    metrics.observe("moonpool:stage_seconds", 0.1, "queue")
    metrics.histogram("vllm:inter_token_latency_seconds").observe_all((0.004, 0.2))
    metrics.set_cache(16, 10, 100)
    found = samples(metrics)
    assert found["vllm:prompt_tokens_total", ""] == 100
    assert found["moonpool:requests_rejected_total", "reason=ttft_slo"] == 1
    assert found["moonpool:requests_rejected_total", "reason=another one"] == 1
    assert found["vllm:num_requests_waiting", ""] == 5
    assert found["moonpool:instances", "role=prefill"] == 2
    assert found["moonpool:instances", "role=decode"] == 0, "an alert needs the series"
    assert found["moonpool:stage_seconds_count", "stage=queue"] == 1
    assert found["vllm:inter_token_latency_seconds_count", ""] == 2
    assert found["vllm:inter_token_latency_seconds_bucket", "le=0.005"] == 1
    labels = "block_size=16,kv_cache_max_concurrency=1.60,kv_cache_size_tokens=160"
    assert found["vllm:cache_config_info", f"{labels},num_gpu_blocks=10"] == 1
    metrics.set_all("moonpool:instances", {"decode": 1})
    assert samples(metrics)["moonpool:instances", "role=prefill"] == 0


def test_a_sample_on_a_bound_counts_as_within_it() -> None:
    histogram = PrometheusHistogram((1.0, 2.0))
    histogram.observe_all((1.0, 1.5, 3.0))

    assert histogram.buckets() == [("1.0", 1.0), ("2.0", 2.0), ("+Inf", 3.0)]
    assert histogram.sum == 5.5


@pytest.mark.parametrize("values", [(), (0, 1, 2, 7, 8, 9), (20_000, 1)])
def test_a_histogram_that_an_instance_counts_is_the_same_as_one_of_the_head(
    values: tuple[float, ...],
) -> None:
    counters: dict[str, float] = {}

    def add(name: str, amount: float = 1) -> None:
        counters[name] = counters.get(name, 0.0) + amount

    here, there = PrometheusHistogram(STEP_TOKENS.bounds), PrometheusHistogram(STEP_TOKENS.bounds)
    for value in values:
        here.observe(value)
        STEP_TOKENS.count(value, add)
    there.grow(STEP_TOKENS.grown(lambda name: counters.get(name, 0.0)))
    assert (there.buckets(), there.sum) == (here.buckets(), here.sum)


def test_bounds_of_counted_histograms_are_those_of_the_catalogue() -> None:
    bounds = {spec.name: spec.bounds for spec in HISTOGRAMS}
    assert bounds["vllm:iteration_tokens_total"] == STEP_TOKENS.bounds
    assert CountedHistogram("x", (1, 2)).grown(lambda _: 2.0).counts == (2, 2, 2)


def test_labels_survive_quotes_and_newlines() -> None:
    metrics = ServerMetrics("tiny")
    metrics.add("moonpool:requests_rejected", label='a"b\nc')

    assert samples(metrics)["moonpool:requests_rejected_total", 'reason=a"b\nc'] == 1
