"""The Prometheus metrics of what is believed of vLLM servers' caches, beside their own counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moonpool.protocol.messages import CacheView
from moonpool.types import InstanceId

_COUNTS = (
    (
        "moonpool:engine_prompt_tokens",
        "Number of prompt tokens that a vLLM server was sent.",
        "prompt_tokens",
    ),
    (
        "moonpool:engine_expected_hits",
        "Number of these tokens that it was expected to have in its prefix cache.",
        "expected_tokens",
    ),
    (
        "moonpool:engine_prefix_cache_queries",
        "Number of prompt tokens that a vLLM server looked up in its prefix cache.",
        "engine_queries",
    ),
    (
        "moonpool:engine_prefix_cache_hits",
        "Number of prompt tokens that a vLLM server found in its prefix cache.",
        "engine_hits",
    ),
)


class EngineCaches(Collector):
    """`set` takes the newest views of one model's instances."""

    def __init__(self) -> None:
        self._model_name = ""
        self._views: dict[InstanceId, CacheView] = {}

    def set(self, model_name: str, views: Mapping[InstanceId, CacheView]) -> None:
        self._model_name, self._views = model_name, dict(views)

    def collect(self) -> Iterator[Metric]:
        if not self._views:
            return
        labels = ("model_name", "instance")
        text = "1 for how it is known what a vLLM server caches: events, assumed or distrusted."
        source = GaugeMetricFamily("moonpool:engine_cache_source", text, labels=(*labels, "source"))
        for name, view in self._views.items():
            source.add_metric((self._model_name, name, view.source), 1.0)
        yield source
        for metric, text, field in _COUNTS:
            family = CounterMetricFamily(metric, text, labels=labels)
            for name, view in self._views.items():
                family.add_metric((self._model_name, name), getattr(view, field))
            yield family
