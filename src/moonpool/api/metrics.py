"""The Prometheus metrics of the server.

A metric has vLLM's name if vLLM has the quantity, so that existing dashboards work; else its name
begins with `moonpool:`. The head pushes all numbers. A sample costs one bisection and no lock:
everything runs on the head's event loop, and the text is built when it is scraped.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from moonpool.types import Struct

# vLLM's bounds, so that its dashboards' quantiles keep their meaning.
# fmt: off
_TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0,
)
_GAP_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
_REQUEST_S = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
)
# fmt: on
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)


_TOTALS = (
    ("vllm:prompt_tokens", "Number of prompt tokens prefilled.", "prompt_tokens"),
    ("vllm:generation_tokens", "Number of tokens generated.", "generation_tokens"),
    (
        "vllm:prefix_cache_queries",
        "Number of prompt tokens looked up in the prefix cache.",
        "prompt_tokens",
    ),
    (
        "vllm:prefix_cache_hits",
        "Number of prompt tokens found in the prefix cache.",
        "cached_tokens",
    ),
    (
        "vllm:prompt_tokens_cached",
        "Number of prompt tokens found in the prefix cache.",
        "cached_tokens",
    ),
    ("vllm:spec_decode_num_drafts", "Number of drafts verified.", "drafts"),
    ("vllm:spec_decode_num_draft_tokens", "Number of draft tokens verified.", "draft_tokens"),
    (
        "vllm:spec_decode_num_accepted_tokens",
        "Number of draft tokens that were right.",
        "accepted_draft_tokens",
    ),
    ("moonpool:corrupt_slices", "Number of layer slices with a wrong checksum.", "corrupt_slices"),
    (
        "moonpool:recomputed_tokens",
        "Number of tokens recomputed because a block was lost or corrupt.",
        "recomputed_tokens",
    ),
    ("moonpool:trace_spans", "Number of spans that a collector accepted.", "trace_spans"),
    (
        "moonpool:lost_trace_spans",
        "Number of spans that were lost: the queue was full, or the collector failed.",
        "lost_trace_spans",
    ),
    ("moonpool:ssd_failures", "Number of failed reads and writes of the SSD tier.", "ssd_failures"),
    (
        "moonpool:fetched_tokens",
        "Number of prompt tokens fetched from another instance.",
        "fetched_tokens",
    ),
    (
        "moonpool:wasted_prefills",
        "Number of prefills of requests that were not completed.",
        "wasted_prefills",
    ),
    (
        "moonpool:wasted_prefill_seconds",
        "Seconds of wasted prefills, from first chunk to end.",
        "_wasted_prefill_s",
    ),
    ("moonpool:prefill_seconds", "Seconds of all prefills, from first chunk to end.", "_prefill_s"),
    ("moonpool:transfer_seconds", "Seconds of KVCache streams to decode instances.", "_transfer_s"),
    (
        "moonpool:role_switches_given_up",
        "Number of role switches that were begun but not completed.",
        "role_switches_given_up",
    ),
)
"""Counters without labels: metric, help text, and the total or attribute that holds it."""

_LABELLED = (
    (
        "vllm:request_success",
        "Number of completed requests, by finish reason.",
        "finished_reason",
        "_finished",
    ),
    (
        "moonpool:requests_rejected",
        "Number of requests rejected before their prefill, by reason.",
        "reason",
        "_rejected",
    ),
    (
        "moonpool:requests_failed",
        "Number of accepted requests that failed, by reason.",
        "reason",
        "_failed",
    ),
    (
        "moonpool:transfer_bytes",
        "Bytes of KVCache received, by transport.",
        "transport",
        "_transfer_bytes",
    ),
    (
        "moonpool:transfers",
        "Number of load reports with received KVCache, by transport.",
        "transport",
        "_transfers",
    ),
    (
        "moonpool:ssd_bytes",
        "Bytes written to and read from the SSD tier.",
        "direction",
        "_ssd_bytes",
    ),
    (
        "moonpool:prefetched_blocks",
        "Blocks loaded from the SSD ahead of a request, and how many were used or wasted.",
        "state",
        "_prefetched",
    ),
    (
        "moonpool:ssd_seconds",
        "Seconds that SSD threads spent writing and reading.",
        "direction",
        "_ssd_s",
    ),
    ("moonpool:step_seconds", "Seconds of engine compute, by role.", "role", "_step_s"),
    ("moonpool:role_switches", "Number of instances that switched to a role.", "role", "_switches"),
)
"""Counters by label: metric, help text, label, and the attribute that holds it."""


class Prediction(Struct, frozen=True):
    """The error of the predictions of one quantity, in its unit."""

    count: int
    too_much: float
    too_little: float
    ratio_p50: float
    ratio_p90: float


class PrometheusHistogram:
    """The counts of samples at or below each bound, and their sum."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]):
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Iterable[float]) -> None:
        bounds, counts = self._bounds, self._counts
        for value in values:
            counts[bisect_left(bounds, value)] += 1
            self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Returns the cumulative buckets of the Prometheus format."""
        total = 0
        buckets = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
        return buckets


class ServerMetrics(Collector):
    """All metrics of one head. `text()` renders them."""

    def __init__(self, model_name: str):
        self._model_name = model_name
        self._registry = CollectorRegistry(auto_describe=False)
        self._ttft = PrometheusHistogram(_TTFT_S)
        self._gaps = PrometheusHistogram(_GAP_S)
        self._tpot = PrometheusHistogram(_GAP_S)
        self._e2e = PrometheusHistogram(_REQUEST_S)
        self._prompt_sizes = PrometheusHistogram(_TOKENS)
        self._generation_sizes = PrometheusHistogram(_TOKENS)
        self._max_sizes = PrometheusHistogram(_TOKENS)
        self._queue = PrometheusHistogram(_REQUEST_S)
        self._prefill = PrometheusHistogram(_REQUEST_S)
        self._decode = PrometheusHistogram(_REQUEST_S)
        self._stages: dict[str, PrometheusHistogram] = {}
        self._finished: Counter[str] = Counter()
        self._rejected: Counter[str] = Counter()
        self._failed: Counter[str] = Counter()
        self._transfer_bytes: Counter[str] = Counter()
        self._transfers: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._prefill_s = 0.0
        self._wasted_prefill_s = 0.0
        self._transfer_s = 0.0
        self._step_s: dict[str, float] = {}
        self._loads: dict[str, float] = {}
        self._running = 0
        self._waiting = 0
        self._cache_use = 0.0
        self._instances: dict[str, int] = {}
        self._draining = 0
        self._role_loads: dict[str, float] = {}
        self._advised: dict[str, int] = {}
        self._wanted: dict[str, int] = {}
        self._switches: dict[str, int] = {}
        self._cache = (0, 0)
        self._tier_blocks: dict[str, int] = {}
        self._tier_cached: dict[str, int] = {}
        self._ssd_bytes: Counter[str] = Counter()
        self._prefetched: Counter[str] = Counter()
        self._ssd_s: dict[str, float] = {}
        self._predictions: dict[str, Prediction] = {}
        self._learned: dict[str, dict[str, float]] = {}
        self._registry.register(self)

    def rename(self, model_name: str) -> None:
        """Sets the label of all samples."""
        self._model_name = model_name

    # Samples and totals from the head

    def observe_tokens(self, num_tokens: int, gaps_s: Sequence[float] = ()) -> None:
        """Counts generated tokens and the gaps between them, for one or many requests."""
        self._totals["generation_tokens"] += num_tokens
        self._gaps.observe_all(gaps_s)

    def observe_first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)

    def observe_prompt(self, prompt_tokens: int, cached_tokens: int) -> None:
        """Counts a prefilled prompt, of which `cached_tokens` came from a cache."""
        self._totals["prompt_tokens"] += prompt_tokens
        self._totals["cached_tokens"] += cached_tokens
        self._prompt_sizes.observe(prompt_tokens)

    def observe_prefill(self, seconds: float, fetched_tokens: int, wasted: bool) -> None:
        """Counts the time of a prefill. `wasted`: its request was not completed."""
        self._prefill_s += seconds
        self._totals["fetched_tokens"] += fetched_tokens
        if wasted:
            self._wasted_prefill_s += seconds
            self._totals["wasted_prefills"] += 1

    def observe_finished(
        self,
        finish_reason: str,
        *,
        e2e_s: float,
        generation_tokens: int,
        tpot_s: float | None = None,
        stages_s: Mapping[str, float] | None = None,
        phases_s: tuple[float, float, float] | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """Counts a completed request. `tpot_s` is set if it had more than one token. `phases_s`:
        its times before prefill, in prefill, and from the first token on, as vLLM divides it."""
        self._finished[finish_reason] += 1
        self._e2e.observe(e2e_s)
        self._generation_sizes.observe(generation_tokens)
        if tpot_s is not None:
            self._tpot.observe(tpot_s)
        self._max_sizes.observe(generation_tokens if max_tokens is None else max_tokens)
        if phases_s is not None:
            for histogram, seconds in zip(
                (self._queue, self._prefill, self._decode), phases_s, strict=True
            ):
                histogram.observe(seconds)
        for stage, seconds in (stages_s or {}).items():
            self._stage(stage).observe(seconds)

    def observe_rejected(self, reason: str) -> None:
        """Counts a request that was rejected before its prefill."""
        self._rejected[reason] += 1

    def observe_failed(self, reason: str) -> None:
        """Counts an accepted request that failed: deadline, lost instance, client gone."""
        self._failed[reason] += 1

    def add_transfer(self, transport: str, num_bytes: int, num_transfers: int = 1) -> None:
        self._transfer_bytes[transport] += num_bytes
        self._transfers[transport] += num_transfers

    def add_corrupt_slices(self, count: int = 1) -> None:
        """Counts layer slices with a wrong checksum; each was recomputed."""
        self._totals["corrupt_slices"] += count

    def add_recomputed_tokens(self, count: int) -> None:
        self._totals["recomputed_tokens"] += count

    def add_drafts(self, drafts: int, draft_tokens: int, accepted_tokens: int) -> None:
        self._totals["drafts"] += drafts
        self._totals["draft_tokens"] += draft_tokens
        self._totals["accepted_draft_tokens"] += accepted_tokens

    def add_step_seconds(self, role: str, seconds: float) -> None:
        """Adds the compute time of engines of one role."""
        self._step_s[role] = self._step_s.get(role, 0.0) + seconds

    def add_transfer_seconds(self, seconds: float) -> None:
        """Adds the time of a KVCache stream to a decode instance."""
        self._transfer_s += seconds

    def add_ssd(self, direction: str, num_bytes: int, seconds: float) -> None:
        """Adds bytes "written" or "read" by the SSD tier, and the time of its threads."""
        self._ssd_bytes[direction] += num_bytes
        self._ssd_s[direction] = self._ssd_s.get(direction, 0.0) + seconds

    def add_prefetched(self, state: str, num_blocks: int) -> None:
        """Adds prefetched blocks: "loaded", then "used" or "wasted" once that is known."""
        self._prefetched[state] += num_blocks

    def add_ssd_failures(self, count: int) -> None:
        """Counts failed disk operations. A damaged block is not a failed operation."""
        self._totals["ssd_failures"] += count

    def set_trace_spans(self, num_sent: int, num_lost: int) -> None:
        """Takes over the exporter's totals."""
        self._totals["trace_spans"] = num_sent
        self._totals["lost_trace_spans"] = num_lost

    def set_cache(self, block_tokens: int, num_blocks: int) -> None:
        """Sets the KVCache size of all instances, which vLLM reports as well."""
        self._cache = block_tokens, num_blocks

    def set_tiers(self, blocks: Mapping[str, int], cached: Mapping[str, int]) -> None:
        """Sets, by tier ("dram", "ssd"), the blocks of all instances and their cached blocks."""
        self._tier_blocks, self._tier_cached = dict(blocks), dict(cached)

    def set_pool_loads(self, loads: Mapping[str, float]) -> None:
        """Sets the predicted latency over the SLO, by pool."""
        self._loads = dict(loads)

    def set_load(self, running: int, waiting: int, cache_use: float) -> None:
        """`cache_use`: blocks in use over all blocks, 0 to 1."""
        self._running, self._waiting, self._cache_use = running, waiting, cache_use

    def set_instances(self, alive_by_role: Mapping[str, int]) -> None:
        self._instances = dict(alive_by_role)

    def set_role_balance(
        self,
        *,
        loads: Mapping[str, float],
        advised: Mapping[str, int],
        switches: Mapping[str, int],
        given_up: int,
        draining: int,
        wanted: Mapping[str, int],
    ) -> None:
        """Sets the state of the role balance, by role.

        `loads`: demand over capacity. `advised`: additional instances that the role needs.
        `switches`: instances that have switched to the role. `given_up`: switches that were begun
        but not completed. `wanted`: instances that autoscale wants.
        """
        self._role_loads, self._advised = dict(loads), dict(advised)
        self._switches, self._draining = dict(switches), draining
        self._wanted = dict(wanted)
        self._totals["role_switches_given_up"] = given_up

    def set_predictions(self, predictions: Mapping[str, Prediction]) -> None:
        """Sets the prediction errors so far, by quantity."""
        self._predictions = dict(predictions)

    def set_learned(self, factors: Mapping[str, Mapping[str, float]]) -> None:
        """Sets the learned time over the profile's time, by kind of work and instance."""
        self._learned = {kind: dict(of_instance) for kind, of_instance in factors.items()}

    # The Prometheus collector

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _stage(self, stage: str) -> PrometheusHistogram:
        found = self._stages.get(stage)
        if found is None:
            found = self._stages[stage] = PrometheusHistogram(_REQUEST_S)
        return found

    def _gauges(self) -> Iterator[Metric]:
        plain = (
            (
                "vllm:num_requests_running",
                "Number of requests in prefill or decode.",
                self._running,
            ),
            (
                "vllm:num_requests_waiting",
                "Number of requests placed on an instance but not started.",
                self._waiting,
            ),
            (
                "vllm:kv_cache_usage_perc",
                "KVCache blocks in use, as a share of all blocks (1 means full).",
                self._cache_use,
            ),
            (
                "moonpool:draining_instances",
                "Number of instances that drain and accept no new requests.",
                self._draining,
            ),
        )
        for name, text, value in plain:
            yield self._gauge(name, text, None, {"": value})
        for name, text, values in self._by_role():
            yield self._gauge(name, text, "role", values)
        yield self._gauge(
            "moonpool:tier_blocks", "Number of KVCache blocks in a tier.", "tier", self._tier_blocks
        )
        yield self._gauge(
            "moonpool:tier_cached_blocks",
            "Number of blocks in a tier that hold a cached prefix block.",
            "tier",
            self._tier_cached,
        )
        yield self._gauge(
            "moonpool:pool_load", "Predicted latency over the SLO, by pool.", "pool", self._loads
        )
        errors = self._predictions
        for part, ratios in (
            ("p50", {what: each.ratio_p50 for what, each in errors.items()}),
            ("p90", {what: each.ratio_p90 for what, each in errors.items()}),
        ):
            text = f"Predicted over actual value, {part} of all predictions (1 means exact)."
            yield self._gauge(f"moonpool:prediction_ratio_{part}", text, "quantity", ratios)
        if self._cache[0]:
            text = "KVCache of all instances: tokens per block and number of blocks."
            info = GaugeMetricFamily(
                "vllm:cache_config_info", text, labels=["block_size", "num_gpu_blocks", "engine"]
            )
            info.add_metric([*(str(number) for number in self._cache), _ENGINE], 1.0)
            yield info
        for kind, factors in self._learned.items():
            text = f"Learned time of {kind} over the time in the profile, by instance."
            yield self._gauge(f"moonpool:learned_{kind}_factor", text, "instance", factors)

    def _by_role(self) -> tuple[tuple[str, str, Mapping[str, float]], ...]:
        return (
            ("moonpool:instances", "Number of live instances, by role.", self._instances),
            (
                "moonpool:role_load",
                "Demand of a pool over its capacity, by role.",
                self._role_loads,
            ),
            (
                "moonpool:role_advised",
                "Number of additional instances that a pool needs, by role.",
                self._advised,
            ),
            (
                "moonpool:wanted_instances",
                "Number of instances that the load wants, by role.",
                self._wanted,
            ),
        )

    def _counters(self) -> Iterator[Metric]:
        for name, text, key in _TOTALS:
            value = getattr(self, key) if key.startswith("_") else self._totals[key]
            yield self._counter(name, text, None, {"": value})
        labelled: list[tuple[str, str, str, Mapping[str, float]]] = [
            (name, text, label, getattr(self, key)) for name, text, label, key in _LABELLED
        ]
        for name, text, label, counts in (*labelled, *self._prediction_sums()):
            yield self._counter(name, text, label, counts)

    def _prediction_sums(self) -> Iterator[tuple[str, str, str, dict[str, float]]]:
        """Yields the sums from which a dashboard computes the mean error of any period."""
        for suffix, text in (
            ("", "Number of predictions compared with the actual value."),
            ("_too_much", "Sum of the overestimates, in the quantity's unit."),
            ("_too_little", "Sum of the underestimates, in the quantity's unit."),
        ):
            part = suffix.strip("_") or "count"
            values = {what: float(getattr(each, part)) for what, each in self._predictions.items()}
            yield f"moonpool:predictions{suffix}", text, "quantity", values

    def _histograms(self) -> Iterator[Metric]:
        plain = (
            (
                "vllm:time_to_first_token_seconds",
                "Seconds from arrival to first token.",
                self._ttft,
            ),
            ("vllm:inter_token_latency_seconds", "Seconds between two tokens.", self._gaps),
            (
                "vllm:request_time_per_output_token_seconds",
                "Mean seconds between the tokens of a request.",
                self._tpot,
            ),
            ("vllm:e2e_request_latency_seconds", "Seconds from arrival to last token.", self._e2e),
            (
                "vllm:request_prompt_tokens",
                "Number of prompt tokens per request.",
                self._prompt_sizes,
            ),
            (
                "vllm:request_generation_tokens",
                "Number of generated tokens per request.",
                self._generation_sizes,
            ),
            (
                "vllm:request_max_num_generation_tokens",
                "Number of tokens that a request allowed.",
                self._max_sizes,
            ),
            ("vllm:request_queue_time_seconds", "Seconds before prefill.", self._queue),
            ("vllm:request_prefill_time_seconds", "Seconds in prefill.", self._prefill),
            ("vllm:request_decode_time_seconds", "Seconds after the first token.", self._decode),
        )
        for name, text, histogram in plain:
            yield self._histogram(name, text, None, {"": histogram})
        yield self._histogram(
            "moonpool:stage_seconds", "Seconds of a request in each stage.", "stage", self._stages
        )

    def _gauge(
        self, name: str, text: str, label: str | None, values: Mapping[str, float]
    ) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_label_names(label))
        for key, value in values.items():
            family.add_metric(self._label_values(label, key), value)
        return family

    def _counter(
        self, name: str, text: str, label: str | None, values: Mapping[str, float]
    ) -> Metric:
        family = CounterMetricFamily(name, text, labels=_label_names(label))
        for key, value in values.items():
            family.add_metric(self._label_values(label, key), value)
        return family

    def _histogram(
        self, name: str, text: str, label: str | None, values: Mapping[str, PrometheusHistogram]
    ) -> Metric:
        family = HistogramMetricFamily(name, text, labels=_label_names(label))
        for key, histogram in values.items():
            labels = self._label_values(label, key)
            family.add_metric(labels, histogram.buckets(), histogram.sum)
        return family

    def _label_values(self, label: str | None, key: str) -> tuple[str, ...]:
        own = (self._model_name, _ENGINE)
        return own if label is None else (*own, key)


_ENGINE = "0"
"""vLLM numbers the engines of a server; its dashboards filter by that. Here the head is one."""


def _label_names(label: str | None) -> tuple[str, ...]:
    own = ("model_name", "engine")
    return own if label is None else (*own, label)
