"""The Prometheus metrics of what is believed of vLLM servers' caches, beside their own counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonpool.api.metrics.catalogue import CACHE_COUNTS, CACHE_SOURCE
from moonpool.protocol.messages import CacheView
from moonpool.types import InstanceId

_FIELDS = ("prompt_tokens", "expected_tokens", "engine_queries", "engine_hits")
"""The fields of `CacheView`, in the order of `CACHE_COUNTS`."""


class EngineCaches(Collector):
    """`set` takes the newest views of one model's instances."""

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
