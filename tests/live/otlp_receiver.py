"""Runs an OTLP receiver that keeps the spans it gets, and a real collector in front of it."""

from __future__ import annotations

import gzip
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from moonpool_lab.demo.local_server import free_port
from tests.live.calls import fresh

PATIENCE_S = 300.0


@dataclass
class Span:
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begin_ns: int
    end_ns: int
    attributes: dict[str, Any]
    service: str


@dataclass
class Receiver:
    endpoint: str
    spans: list[Span] = field(default_factory=list)

    def trace(self, trace_id: str, num_roots: int = 1) -> list[Span]:
        """Waits for the spans of a trace and returns these spans."""
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            found = [span for span in self.spans if span.trace_id == trace_id]
            if sum(span.name == "llm_request" for span in found) >= num_roots:
                return found
            time.sleep(0.05)
        raise AssertionError(f"no trace {trace_id} among {len(self.spans)} spans")


@contextmanager
def receiver() -> Iterator[Receiver]:
    """Decodes what arrives at /v1/traces with OpenTelemetry's own protocol definitions."""
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    found = Receiver("")

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces", self.path
            message = service.ExportTraceServiceRequest.FromString(body)
            for group in message.resource_spans:
                resource = {each.key: _value(each.value) for each in group.resource.attributes}
                for scope in group.scope_spans:
                    found.spans += [_span(one, resource) for one in scope.spans]
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.end_headers()
            self.wfile.write(service.ExportTraceServiceResponse().SerializeToString())

        def log_message(self, *words: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    found.endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()


def _span(one: Any, resource: dict[str, Any]) -> Span:
    return Span(
        one.name,
        one.trace_id.hex(),
        one.span_id.hex(),
        one.parent_span_id.hex(),
        one.start_time_unix_nano,
        one.end_time_unix_nano,
        {each.key: _value(each.value) for each in one.attributes},
        str(resource["service.name"]),
    )


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))


@contextmanager
def collector(behind: Receiver) -> Iterator[str]:
    """Runs rotel, an OpenTelemetry collector; yields the endpoint of its OTLP receiver."""
    rotel = pytest.importorskip("rotel.agent")
    port, grpc_port = free_port(), free_port()
    line = [str(Path(rotel.__file__).parent / "rotel-agent"), "start"]
    line += ["--otlp-http-endpoint", f"127.0.0.1:{port}", "--otlp-grpc-endpoint"]
    line += [f"127.0.0.1:{grpc_port}", "--exporter", "otlp", "--otlp-exporter-protocol", "http"]
    line += ["--otlp-exporter-endpoint", behind.endpoint.removesuffix("/v1/traces")]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            assert process.poll() is None, "the collector has ended"
            try:
                fresh.get(f"http://127.0.0.1:{port}/", timeout=1)
                break
            except httpx.TransportError:
                time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(120)
