"""Sends the spans of ended requests to an OpenTelemetry collector (OTLP).

    llm_request
      placement
      queue_and_fetch     fetch, ssd_load
      prefill             prefill_chunk ...
      handover            kvcache_transfer
      decode

The spans follow from the request's record, which also holds what the workers reported. A separate
thread makes and sends the spans. The queue of this thread is bounded: spans that do not fit are
dropped and counted.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from moonpool.config.tables import ConfigError
from moonpool.installation import install_command
from moonpool.log_limit import limited_logger
from moonpool.request_record import STAGES, RecordedSpan, RequestRecord
from moonpool.types import FinishReason

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter

log = limited_logger("moonpool.traces")

QUEUE_REQUESTS = 2048
BATCH_REQUESTS = 64
SEND_S = 10.0
CLOSE_S = 5.0
PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
_PARTS = {
    "fetch": "queue_and_fetch",
    "ssd_load": "queue_and_fetch",
    "prefill_chunk": "prefill",
    "kvcache_transfer": "handover",
}
"""Maps each part to the stage under which it appears."""
_ON_PREFILL = ("queue_and_fetch", "prefill")
_ANSWERED = (FinishReason.STOP.value, FinishReason.LENGTH.value)


def open_exporter(endpoint: str) -> TraceExporter | None:
    """Returns None without an endpoint. Raises ConfigError if the extra `otel` or the URL cannot be
    used."""
    if not endpoint:
        return None
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        text = f"telemetry.otlp_traces_endpoint: {endpoint!r} is no URL of a collector, such as"
        raise ConfigError(f"{text} http://127.0.0.1:4318/v1/traces")
    try:
        return TraceExporter(_make_exporter(endpoint))
    except ImportError as error:
        text = "--otlp-traces-endpoint needs OpenTelemetry, which is not installed"
        if isinstance(error, ModuleNotFoundError):
            raise ConfigError(f"{text}: {install_command('otel')}") from None
        # xds-protos (in the extra epp) brings older files of one of OpenTelemetry's packages.
        raise ConfigError(
            "--otlp-traces-endpoint needs files of OpenTelemetry that another package has replaced:"
            " pip install --force-reinstall --no-deps opentelemetry-proto"
        ) from None


def _make_exporter(endpoint: str) -> SpanExporter:
    """Makes an exporter for OTLP over HTTP, or over gRPC if the environment asks for it, as in
    vLLM."""
    # Failed exports are counted and logged below, within a limit.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    if os.environ.get(PROTOCOL_VARIABLE, "http/protobuf") == "grpc":
        from importlib import import_module

        grpc = import_module("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
        insecure = not endpoint.startswith("https:")
        made: SpanExporter = grpc.OTLPSpanExporter(endpoint, insecure=insecure, timeout=SEND_S)
        return made
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    if urlsplit(endpoint).path in ("", "/"):
        endpoint = endpoint.rstrip("/") + "/v1/traces"
    return OTLPSpanExporter(endpoint=endpoint, timeout=SEND_S)


class TraceExporter:
    """Owns the queue and the thread. `request_ended` returns immediately."""

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource

        self.num_sent = 0
        self.num_lost = 0
        name = os.environ.get("OTEL_SERVICE_NAME", "moonpool")
        self._resource = Resource.create({SERVICE_NAME: name})
        self._exporter = exporter
        self._queue: queue.Queue[tuple[RequestRecord, float] | None] = queue.Queue(QUEUE_REQUESTS)
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def request_ended(self, record: RequestRecord, now: float) -> None:
        """Queues the spans of a record, if its request is traced; `now` is on the record's
        clock."""
        if record.trace is None or not record.trace.exported:
            return
        self.num_lost += record.num_lost_spans
        try:
            self._queue.put_nowait((record, time.time() - now))
        except queue.Full:
            self.num_lost += _num_spans(record)
            log.warning("lost the spans of %s: the collector is too slow", record.request_id)

    def close(self) -> None:
        """Sends what is queued, for at most CLOSE_S."""
        try:
            self._queue.put(None, timeout=CLOSE_S)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        is_open = True
        while is_open:
            items = [self._queue.get()]
            while len(items) < BATCH_REQUESTS:
                try:
                    items.append(self._queue.get_nowait())
                except queue.Empty:
                    break
            is_open = None not in items
            spans = [
                span
                for item in items
                if item is not None
                for span in spans_of(item[0], item[1], self._resource)
            ]
            if spans:
                self._send(spans)
        self._exporter.shutdown()

    def _send(self, spans: list[ReadableSpan]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception as error:  # a fault in the library must not end the thread
            sent = False
            log.warning("the trace exporter failed: %s: %s", type(error).__name__, error)
        if sent:
            self.num_sent += len(spans)
        else:
            self.num_lost += len(spans)
            log.warning("lost %d spans: the collector did not accept them", len(spans))


def _num_spans(record: RequestRecord) -> int:
    return 1 + len(record.stages_s()) + len(record.spans)


# Spans


def spans_of(record: RequestRecord, offset_s: float, resource: Any) -> Iterator[ReadableSpan]:
    """Yields the spans of an ended request, starting with the request's own span.

    `offset_s`: seconds between the record's clock and the epoch. Times of the workers' parts are
    converted to the head's clock, less the latency of the report.
    """
    from opentelemetry.trace import SpanKind, Status, StatusCode

    trace = record.trace
    assert trace is not None and record.finished_s is not None
    make = _SpanMaker(trace.trace_id, offset_s, resource)
    answered = record.outcome in _ANSWERED
    status = Status(StatusCode.OK) if answered else Status(StatusCode.ERROR, record.outcome)
    yield make.span(
        "llm_request",
        trace.span_id,
        trace.parent_id,
        (record.arrived_s, record.finished_s),
        _request_attributes(record),
        kind=SpanKind.SERVER,
        status=status,
    )
    stage_ids: dict[str, str] = {}
    for name, begin, end in STAGES:
        begin_s, end_s = getattr(record, f"{begin}_s"), getattr(record, f"{end}_s")
        if begin_s is None:
            continue
        stage_ids[name] = secrets.token_hex(8)
        place = record.prefill_instance if name in _ON_PREFILL else record.decode_instance
        attributes = {} if place is None or name == "placement" else {"moonpool.instance": place}
        # In a request that ends early, the last stage ends with the request.
        times = (begin_s, max(record.finished_s if end_s is None else end_s, begin_s))
        yield make.span(name, stage_ids[name], trace.span_id, times, attributes)
        if end_s is None:
            break
    for part in record.spans:
        parent = stage_ids.get(_PARTS.get(part.name, ""), trace.span_id)
        times = (part.begin_s, part.end_s)
        yield make.span(part.name, secrets.token_hex(8), parent, times, _part_attributes(part))


def _request_attributes(record: RequestRecord) -> dict[str, Any]:
    """Returns the attributes of a span, with vLLM's names where vLLM has the quantity."""
    assert record.finished_s is not None
    stages_s = record.stages_s()
    found = {
        "gen_ai.request.id": record.request_id,
        "gen_ai.request.max_tokens": record.max_tokens,
        "gen_ai.usage.prompt_tokens": record.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": record.answer_tokens,
        "gen_ai.latency.e2e": record.finished_s - record.arrived_s,
        "gen_ai.latency.time_to_first_token": record.ttft_s,
        "gen_ai.latency.time_in_queue": stages_s.get("queue_and_fetch"),
        "moonpool.outcome": record.outcome,
        "moonpool.attempts": record.attempts,
        "moonpool.cached_tokens": record.cached_tokens,
        "moonpool.fetched_tokens": record.fetched_tokens,
        "moonpool.ssd_tokens": record.loaded_tokens,
        "moonpool.prefill_instance": record.prefill_instance,
        "moonpool.decode_instance": record.decode_instance,
        "moonpool.tbt_top10_mean": record.tbt_top10_mean_s,
        "moonpool.within_slos": record.effective,
        "moonpool.slo_class": record.slo.class_name or None,
        "moonpool.tenant": record.tenant or None,
        "gen_ai.conversation.id": record.program or None,
        "moonpool.program": record.program or None,
        "moonpool.parent_program": record.parent_program or None,
    }
    return {name: value for name, value in found.items() if value is not None}


def _part_attributes(part: RecordedSpan) -> dict[str, Any]:
    found: dict[str, Any] = {"moonpool.instance": part.instance_id}
    if part.num_tokens:
        found["moonpool.tokens"] = part.num_tokens
    if part.num_bytes:
        found["moonpool.bytes"] = part.num_bytes
    return found


class _SpanMaker:
    def __init__(self, trace_id: str, offset_s: float, resource: Any) -> None:
        self._trace_id = int(trace_id, 16)
        self._offset_s = offset_s
        self._resource = resource

    def _context(self, span_id: str, *, is_remote: bool = False) -> Any:
        from opentelemetry.trace import SpanContext, TraceFlags

        flags = TraceFlags(TraceFlags.SAMPLED)
        return SpanContext(self._trace_id, int(span_id, 16), is_remote, flags)

    def span(
        self,
        name: str,
        span_id: str,
        parent_id: str,
        times_s: tuple[float, float],
        attributes: dict[str, Any],
        **more: Any,
    ) -> ReadableSpan:
        from opentelemetry.sdk.trace import ReadableSpan

        begin_ns, end_ns = (int(1e9 * (instant_s + self._offset_s)) for instant_s in times_s)
        return ReadableSpan(
            name,
            context=self._context(span_id),
            parent=self._context(parent_id, is_remote="kind" in more) if parent_id else None,
            resource=self._resource,
            attributes=attributes,
            start_time=begin_ns,
            end_time=end_ns,
            **more,
        )
