"""The Prometheus text of several models; a metric that several models have becomes one family."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from moonpool.api.metrics.catalogue import CACHE_COUNTS, CACHE_SOURCE
from moonpool.protocol.messages import CacheView
from moonpool.types import InstanceId


def metrics_text(collectors: Sequence[Collector]) -> bytes:
    """Returns the Prometheus text, with the resources that the process uses. Samples differ in a
    label, such as the model's name; of equal samples the first counts."""
    return generate_latest(_Families([*collectors, ProcessCollector(registry=None)]))


class _Families(Collector):
    def __init__(self, collectors: Iterable[Collector]) -> None:
        self._collectors = collectors

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for collector in self._collectors:
            for metric in collector.collect():
                known = families.setdefault(metric.name, metric)
                if known is not metric:
                    _add(known, metric)
        yield from families.values()


def _add(known: Metric, metric: Metric) -> None:
    had = {(sample.name, *sorted(sample.labels.items())) for sample in known.samples}
    known.samples.extend(
        sample
        for sample in metric.samples
        if (sample.name, *sorted(sample.labels.items())) not in had
    )


_FIELDS = ("prompt_tokens", "expected_tokens", "engine_queries", "engine_hits")
"""The fields of `CacheView`, in the order of `CACHE_COUNTS`."""


class EngineCaches(Collector):
    """What the head assumes about the caches of vLLM servers, beside the servers' own counts. `set`
    replaces the views of one model's instances by the newest ones."""

    def __init__(self) -> None:
        self._model_name = ""
        self._views: dict[InstanceId, CacheView] = {}

    def set(self, model_name: str, views: Mapping[InstanceId, CacheView]) -> None:
        self._model_name, self._views = model_name, dict(views)

    def collect(self) -> Iterator[Metric]:
        labels = ("model_name", "instance_id")
        spec = CACHE_SOURCE
        source = GaugeMetricFamily(spec.name, spec.meaning, labels=(*labels, "source"))
        for name, view in self._views.items():
            source.add_metric((self._model_name, name, view.source), 1.0)
        yield source
        for spec, field in zip(CACHE_COUNTS, _FIELDS, strict=True):
            family = CounterMetricFamily(spec.name, spec.meaning, labels=labels)
            for name, view in self._views.items():
                family.add_metric((self._model_name, name), getattr(view, field))
            yield family
