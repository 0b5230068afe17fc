"""The values of the metrics of one head, and their text for Prometheus.

The head pushes all numbers. A sample costs one bisection and no lock, because everything runs on
the head's event loop, and the text is built when it is scraped (`api.models.metrics_text`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from moonpool.api.metrics.catalogue import COUNTERS, GAUGES, HISTOGRAMS, INFO, MetricSpec
from moonpool.protocol.instance_counters import Growth

_ENGINE = "0"
"""vLLM numbers the engines of a server, and its dashboards filter by that number. Here the head
counts as one engine."""
_OWN_LABELS = ("model_name", "engine")


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

    def grow(self, growth: Growth) -> None:
        """Adds samples with the same bounds that were counted elsewhere."""
        self._counts = [a + b for a, b in zip(self._counts, growth.counts, strict=True)]
        self.sum += growth.sum

    def buckets(self) -> list[tuple[str, float]]:
        """Returns the cumulative buckets of the Prometheus format."""
        total = 0
        buckets = []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
        return buckets


class ServerMetrics(Collector):
    """All metrics of the catalogue, by name (without `_total`)."""

    def __init__(self, model_name: str):
        self._model_name = model_name
        self._values: dict[str, dict[str, float]] = {
            spec.name: dict.fromkeys(spec.known if spec.label else ("",), 0.0)
            for spec in (*GAUGES, *COUNTERS)
        }
        self._histograms: dict[str, dict[str, PrometheusHistogram]] = {
            spec.name: {} if spec.label else {"": PrometheusHistogram(spec.bounds)}
            for spec in HISTOGRAMS
        }
        self._bounds = {spec.name: spec.bounds for spec in HISTOGRAMS}
        self._cache_labels: tuple[str, ...] | None = None

    def rename(self, model_name: str) -> None:
        """Sets the model label of all samples."""
        self._model_name = model_name

    def add(self, name: str, amount: float = 1.0, label: str = "") -> None:
        """Raises a counter. With an amount of 0, the counter's series exists from now on."""
        values = self._values[name]
        values[label] = values.get(label, 0.0) + amount

    def values(self, name: str) -> Mapping[str, float]:
        """Returns the values of a gauge or counter by label; the label is "" if the metric has
        none."""
        return self._values[name]

    def set(self, name: str, value: float) -> None:
        """Sets a gauge, or the total of a counter that is kept elsewhere."""
        self._values[name][""] = value

    def set_all(self, name: str, values: Mapping[str, float]) -> None:
        """Sets the values by label. Known labels that are left out get the value 0; series of other
        labels end."""
        known = next(spec.known for spec in (*GAUGES, *COUNTERS) if spec.name == name)
        self._values[name] = {**dict.fromkeys(known, 0.0), **values}

    def observe(self, name: str, value: float, label: str = "") -> None:
        """Adds a sample to a histogram."""
        self.histogram(name, label).observe(value)

    def histogram(self, name: str, label: str = "") -> PrometheusHistogram:
        found = self._histograms[name].get(label)
        if found is None:
            found = self._histograms[name][label] = PrometheusHistogram(self._bounds[name])
        return found

    def set_cache(self, block_tokens: int, num_blocks: int, longest_tokens: int) -> None:
        """Sets the KVCache of all instances. `longest_tokens`: number of tokens of the longest
        request."""
        num_tokens = block_tokens * num_blocks
        most = num_tokens / longest_tokens
        numbers = (str(block_tokens), str(num_blocks), str(num_tokens), f"{most:.2f}")
        self._cache_labels = numbers if num_blocks else None

    # Methods of a Prometheus collector

    def collect(self) -> Iterator[Metric]:
        for spec in GAUGES:
            yield self._filled(
                GaugeMetricFamily(spec.name, spec.meaning, labels=_labels(spec)), spec
            )
        yield from self._info()
        for spec in COUNTERS:
            family = CounterMetricFamily(spec.name, spec.meaning, labels=_labels(spec))
            yield self._filled(family, spec)
        for spec in HISTOGRAMS:
            histograms = HistogramMetricFamily(spec.name, spec.meaning, labels=_labels(spec))
            for label, histogram in self._histograms[spec.name].items():
                values = self._label_values(spec, label)
                histograms.add_metric(values, histogram.buckets(), histogram.sum)
            yield histograms

    def _filled(self, family: GaugeMetricFamily | CounterMetricFamily, spec: MetricSpec) -> Metric:
        for label, value in self._values[spec.name].items():
            family.add_metric(self._label_values(spec, label), value)
        return family

    def _info(self) -> Iterator[Metric]:
        if self._cache_labels is not None:
            labels = [*INFO.label.split(", "), "engine"]
            info = GaugeMetricFamily(INFO.name, INFO.meaning, labels=labels)
            info.add_metric([*self._cache_labels, _ENGINE], 1.0)
            yield info

    def _label_values(self, spec: MetricSpec, label: str) -> tuple[str, ...]:
        own = (self._model_name, _ENGINE)
        return (*own, label) if spec.label else own


def _labels(spec: MetricSpec) -> tuple[str, ...]:
    return (*_OWN_LABELS, spec.label) if spec.label else _OWN_LABELS
