"""Tests the metrics of each SLO class."""

from __future__ import annotations

import pytest

from moonpool.api.metrics.server_metrics import ServerMetrics
from moonpool.config.parse import parse_config
from moonpool.config.slo import DEFAULT_CLASS, MAX_CLASSES, SloClass, SloConfig
from moonpool.config.tables import ConfigError
from moonpool.head.watch.metrics_collector import MetricsCollector
from moonpool.request_record import RequestRecord
from moonpool.types import RequestId

COUNTERS = (
    "moonpool:slo_class_requests",
    "moonpool:slo_class_effective_requests",
    "moonpool:slo_class_rejections",
)
LEVELS = SloConfig(classes=(SloClass(name="chat", ttft_s=1.0, tbt_s=0.1),))


def ended(outcome: str, ttft_s: float | None, slo_class: str, attempts: int = 1) -> RequestRecord:
    record = RequestRecord(RequestId("r"), 4, LEVELS.slo_of(slo_class, ""), 10.0)
    record.attempts, record.outcome = attempts, outcome
    if ttft_s is not None:
        record.note_tokens(1, 10.0 + ttft_s)
    record.finished_s = 20.0
    return record


def counts(metrics: ServerMetrics) -> dict[str, tuple[float, ...]]:
    """Returns requests, effective requests and rejections of each class."""
    names = metrics.values(COUNTERS[0])
    return {name: tuple(metrics.values(each)[name] for each in COUNTERS) for name in names}


def test_each_class_counts_what_it_got() -> None:
    metrics = ServerMetrics("m")
    collector = MetricsCollector(metrics, LEVELS.class_names)
    assert counts(metrics) == {"chat": (0, 0, 0), "default": (0, 0, 0)}, "from the start"
    for record in (
        ended("stop", 0.5, "chat"),
        ended("length", 1.5, "chat"),  # too late for the SLO of its class
        ended("ttft_slo", None, "chat", attempts=0),
        ended("instance_lost", 0.5, "chat"),
        ended("abort", 0.5, "chat"),  # its client left
        ended("stop", 1.5, ""),
    ):
        collector.request_ended(record, 20.0)
    assert counts(metrics) == {"chat": (4, 1, 1), "default": (1, 1, 0)}


def test_without_classes_there_are_no_series() -> None:
    metrics = ServerMetrics("m")
    collector = MetricsCollector(metrics, SloConfig().class_names)
    record = ended("stop", 0.5, "")
    record.slo = SloConfig().slo_of("", "chat")
    collector.request_ended(record, 20.0)
    assert counts(metrics) == {}


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a", "a"], "of different names"),
        ([DEFAULT_CLASS], "levels of requests without one"),
        ([str(number) for number in range(MAX_CLASSES + 1)], f"at most {MAX_CLASSES}"),
        (["x" * 129], "128"),
    ],
)
def test_classes_that_cannot_be(names: list[str], words: str) -> None:
    rows = (f'[[slo.classes]]\nname = "{name}"\nttft_s = 1\ntbt_s = 1\n' for name in names)
    with pytest.raises(ConfigError, match=words):
        parse_config("".join(rows))
