"""What the server counts, under the names operators' dashboards already know.

Owns the numbers the head observes; reads nothing by itself. vLLM's name where vLLM has the
quantity, `moonpool:` for what only moonpool has. A sample costs one bisection and no lock:
everything happens on the head's event loop, and the text is made when it is scraped.
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


class Prediction(Struct, frozen=True):
    """How far the predictions of one quantity were off, in its unit."""

    count: int
    too_much: float
    too_little: float
    ratio_p50: float
    ratio_p90: float


class Histogram:
    """Counts of samples at or below each bound, and their sum."""

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
        """Cumulative, as Prometheus wants them."""
        total = 0
        buckets = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
        return buckets


class ServerMetrics(Collector):
    """Filled by the head, rendered by `text()`."""

    def __init__(self, model_name: str):
        self._model_name = model_name
        self._registry = CollectorRegistry(auto_describe=False)
        self._ttft = Histogram(_TTFT_S)
        self._gaps = Histogram(_GAP_S)
        self._tpot = Histogram(_GAP_S)
        self._e2e = Histogram(_REQUEST_S)
        self._prompt_sizes = Histogram(_TOKENS)
        self._generation_sizes = Histogram(_TOKENS)
        self._stages: dict[str, Histogram] = {}
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
        self._switches: dict[str, int] = {}
        self._cache = (0, 0)
        self._tier_blocks: dict[str, int] = {}
        self._tier_cached: dict[str, int] = {}
        self._ssd_bytes: Counter[str] = Counter()
        self._ssd_s: dict[str, float] = {}
        self._predictions: dict[str, Prediction] = {}
        self._learned: dict[str, dict[str, float]] = {}
        self._registry.register(self)

    # The head tells.

    def observe_tokens(self, num_tokens: int, gaps_s: Sequence[float] = ()) -> None:
        """`num_tokens` more were generated; `gaps_s` between them. For one or many requests."""
        self._totals["generation_tokens"] += num_tokens
        self._gaps.observe_all(gaps_s)

    def observe_first_token(self, ttft_s: float) -> None:
        self._ttft.observe(ttft_s)

    def observe_prompt(self, prompt_tokens: int, cached_tokens: int) -> None:
        """A prompt was prefilled, of which `cached_tokens` were not computed anew."""
        self._totals["prompt_tokens"] += prompt_tokens
        self._totals["cached_tokens"] += cached_tokens
        self._prompt_sizes.observe(prompt_tokens)

    def observe_prefill(self, seconds: float, fetched_tokens: int, wasted: bool) -> None:
        """A prompt's computing took so long; `wasted`: its request was not answered."""
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
    ) -> None:
        """A request was answered. `tpot_s` where it had more than one token."""
        self._finished[finish_reason] += 1
        self._e2e.observe(e2e_s)
        self._generation_sizes.observe(generation_tokens)
        if tpot_s is not None:
            self._tpot.observe(tpot_s)
        for stage, seconds in (stages_s or {}).items():
            self._stage(stage).observe(seconds)

    def observe_rejected(self, reason: str) -> None:
        """Refused before it cost anything."""
        self._rejected[reason] += 1

    def observe_failed(self, reason: str) -> None:
        """Accepted, and not answered: deadline, lost instance, client gone."""
        self._failed[reason] += 1

    def add_transfer(self, transport: str, num_bytes: int, num_transfers: int = 1) -> None:
        self._transfer_bytes[transport] += num_bytes
        self._transfers[transport] += num_transfers

    def add_corrupt_slices(self, count: int = 1) -> None:
        """Layer slices whose checksum did not match; each was recomputed."""
        self._totals["corrupt_slices"] += count

    def add_recomputed_tokens(self, count: int) -> None:
        self._totals["recomputed_tokens"] += count

    def add_step_seconds(self, role: str, seconds: float) -> None:
        """Engines of this role computed for so long."""
        self._step_s[role] = self._step_s.get(role, 0.0) + seconds

    def add_transfer_seconds(self, seconds: float) -> None:
        """A stream of KVCache to a decode instance took so long."""
        self._transfer_s += seconds

    def add_ssd(self, direction: str, num_bytes: int, seconds: float) -> None:
        """The SSD tier has "written" or "read" so much; seconds are those of its threads."""
        self._ssd_bytes[direction] += num_bytes
        self._ssd_s[direction] = self._ssd_s.get(direction, 0.0) + seconds

    def add_ssd_failures(self, count: int) -> None:
        """Writes and reads of the disk that failed; a damaged block is no failure."""
        self._totals["ssd_failures"] += count

    def set_cache(self, block_tokens: int, num_blocks: int) -> None:
        """What all instances together have for KVCache; vLLM tells as much of itself."""
        self._cache = block_tokens, num_blocks

    def set_tiers(self, blocks: Mapping[str, int], cached: Mapping[str, int]) -> None:
        """By tier ("dram", "ssd"): the blocks of all instances, and how many of them hold
        something that has a name."""
        self._tier_blocks, self._tier_cached = dict(blocks), dict(cached)

    def set_pool_loads(self, loads: Mapping[str, float]) -> None:
        """Predicted over promised latency, by pool."""
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
    ) -> None:
        """By role: demand over what its instances can do; how many more it should have; how many
        took it on so far. `given_up`: switches that were begun and did not come about."""
        self._role_loads, self._advised = dict(loads), dict(advised)
        self._switches, self._draining = dict(switches), draining
        self._totals["role_switches_given_up"] = given_up

    def set_predictions(self, predictions: Mapping[str, Prediction]) -> None:
        """All so far, by what was predicted."""
        self._predictions = dict(predictions)

    def set_learned(self, factors: Mapping[str, Mapping[str, float]]) -> None:
        """By kind of work and instance: how many times its profile's time it takes."""
        self._learned = {kind: dict(of_instance) for kind, of_instance in factors.items()}

    # Prometheus asks.

    def text(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counters()
        yield from self._histograms()

    def _stage(self, stage: str) -> Histogram:
        found = self._stages.get(stage)
        if found is None:
            found = self._stages[stage] = Histogram(_REQUEST_S)
        return found

    def _gauges(self) -> Iterator[Metric]:
        plain = (
            ("vllm:num_requests_running", "Requests being prefilled or decoded.", self._running),
            ("vllm:num_requests_waiting", "Requests placed but not yet started.", self._waiting),
            ("vllm:kv_cache_usage_perc", "KVCache blocks in use, 1 is all.", self._cache_use),
            ("moonpool:draining_instances", "Instances without new work.", self._draining),
        )
        for name, text, value in plain:
            yield self._gauge(name, text, None, {"": value})
        by_role = (
            ("moonpool:instances", "Live instances by role.", self._instances),
            ("moonpool:role_load", "Demand over what a pool can do.", self._role_loads),
            ("moonpool:role_advised", "Instances a pool should have more.", self._advised),
        )
        for name, text, values in by_role:
            yield self._gauge(name, text, "role", values)
        yield self._gauge("moonpool:tier_blocks", "Of the pool.", "tier", self._tier_blocks)
        yield self._gauge("moonpool:tier_cached_blocks", "With a name.", "tier", self._tier_cached)
        yield self._gauge(
            "moonpool:pool_load", "Predicted over promised latency.", "pool", self._loads
        )
        said = self._predictions
        for part, ratios in (
            ("p50", {what: each.ratio_p50 for what, each in said.items()}),
            ("p90", {what: each.ratio_p90 for what, each in said.items()}),
        ):
            text = f"Predicted over actual, {part} of all predictions; 1 is right."
            yield self._gauge(f"moonpool:prediction_ratio_{part}", text, "quantity", ratios)
        if self._cache[0]:
            text = "The KVCache of all instances together."
            info = GaugeMetricFamily(
                "vllm:cache_config_info", text, labels=["block_size", "num_gpu_blocks"]
            )
            info.add_metric([str(number) for number in self._cache], 1.0)
            yield info
        for kind, factors in self._learned.items():
            text = f"Time of {kind} as it was learned, over what the profile says."
            yield self._gauge(f"moonpool:learned_{kind}_factor", text, "instance", factors)

    def _counters(self) -> Iterator[Metric]:
        totals = self._totals
        plain = (
            ("vllm:prompt_tokens", "Prompt tokens of answered requests.", totals["prompt_tokens"]),
            ("vllm:generation_tokens", "Tokens generated.", totals["generation_tokens"]),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up.", totals["prompt_tokens"]),
            ("vllm:prefix_cache_hits", "Prompt tokens not recomputed.", totals["cached_tokens"]),
            (
                "moonpool:corrupt_slices",
                "Layer slices whose checksum did not match.",
                totals["corrupt_slices"],
            ),
            (
                "moonpool:recomputed_tokens",
                "Tokens computed again because a block was lost or corrupt.",
                totals["recomputed_tokens"],
            ),
            (
                "moonpool:ssd_failures",
                "Writes and reads of the SSD tier that failed.",
                totals["ssd_failures"],
            ),
            (
                "moonpool:fetched_tokens",
                "Prompt tokens fetched from another instance.",
                totals["fetched_tokens"],
            ),
            (
                "moonpool:wasted_prefills",
                "Prompts computed for requests that were not answered.",
                totals["wasted_prefills"],
            ),
            (
                "moonpool:wasted_prefill_seconds",
                "Seconds spent on them, from their first chunk to their end.",
                self._wasted_prefill_s,
            ),
            (
                "moonpool:prefill_seconds",
                "Seconds spent on all prompts, from first chunk to end.",
                self._prefill_s,
            ),
            (
                "moonpool:transfer_seconds",
                "Seconds that streams of KVCache to decode instances took.",
                self._transfer_s,
            ),
            (
                "moonpool:role_switches_given_up",
                "Switches of a role that were begun and did not come about.",
                totals["role_switches_given_up"],
            ),
        )
        for name, text, value in plain:
            yield self._counter(name, text, None, {"": value})
        by_label: tuple[tuple[str, str, str, Mapping[str, float]], ...] = (
            ("vllm:request_success", "Answered.", "finished_reason", self._finished),
            ("moonpool:requests_rejected", "Refused early.", "reason", self._rejected),
            ("moonpool:requests_failed", "Accepted, not answered.", "reason", self._failed),
            ("moonpool:transfer_bytes", "KVCache moved.", "transport", self._transfer_bytes),
            ("moonpool:transfers", "Transfers done.", "transport", self._transfers),
            ("moonpool:ssd_bytes", "Moved to and from the SSD.", "direction", self._ssd_bytes),
            ("moonpool:ssd_seconds", "Of the threads that did.", "direction", self._ssd_s),
            ("moonpool:step_seconds", "Seconds that engines computed.", "role", self._step_s),
            ("moonpool:role_switches", "Instances that took a role on.", "role", self._switches),
            *self._prediction_sums(),
        )
        for name, text, label, counts in by_label:
            yield self._counter(name, text, label, counts)

    def _prediction_sums(self) -> Iterator[tuple[str, str, str, dict[str, float]]]:
        """Of which a dashboard makes the mean error of any time: rates over rates."""
        for suffix, text in (
            ("", "Predictions that could be compared with what came."),
            ("_too_much", "Sum by which predictions were too high, in the quantity's unit."),
            ("_too_little", "Sum by which they were too low."),
        ):
            part = suffix.strip("_") or "count"
            values = {what: float(getattr(each, part)) for what, each in self._predictions.items()}
            yield f"moonpool:predictions{suffix}", text, "quantity", values

    def _histograms(self) -> Iterator[Metric]:
        plain = (
            ("vllm:time_to_first_token_seconds", "Arrival to first token.", self._ttft),
            ("vllm:inter_token_latency_seconds", "Each gap between two tokens.", self._gaps),
            ("vllm:request_time_per_output_token_seconds", "Mean gap of a request.", self._tpot),
            ("vllm:e2e_request_latency_seconds", "Arrival to last token.", self._e2e),
            ("vllm:request_prompt_tokens", "Prompt tokens per request.", self._prompt_sizes),
            (
                "vllm:request_generation_tokens",
                "Generated tokens per request.",
                self._generation_sizes,
            ),
        )
        for name, text, histogram in plain:
            yield self._histogram(name, text, None, {"": histogram})
        yield self._histogram(
            "moonpool:stage_seconds", "Where a request's time went.", "stage", self._stages
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
        self, name: str, text: str, label: str | None, values: Mapping[str, Histogram]
    ) -> Metric:
        family = HistogramMetricFamily(name, text, labels=_label_names(label))
        for key, histogram in values.items():
            labels = self._label_values(label, key)
            family.add_metric(labels, histogram.buckets(), histogram.sum)
        return family

    def _label_values(self, label: str | None, key: str) -> tuple[str, ...]:
        return (self._model_name,) if label is None else (self._model_name, key)


def _label_names(label: str | None) -> tuple[str, ...]:
    return ("model_name",) if label is None else ("model_name", label)
