"""The Prometheus text of several models: a metric that more than one has is one family."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client.core import Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector


def metrics_text(collectors: Sequence[Collector]) -> bytes:
    """Returns the text, with what the process uses. Samples differ in a label, such as the model's
    name; of equal ones the first counts."""
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
