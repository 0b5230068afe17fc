"""A real collector gets spans of real requests, under the trace that the client began."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from moonpool_lab.demo.local_server import free_port
from tests.forked.commands import LocalServer
from tests.live.calls import fresh
from tests.live.conftest import MODEL, SMALL
from tests.live.otlp_receiver import PATIENCE_S, Receiver, Span, collector, receiver

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ENGINE = "moonpool/induction"
STAGES = ["placement", "queue_and_fetch", "prefill", "handover", "decode"]


@pytest.fixture(scope="module")
def traced() -> Iterator[tuple[LocalServer, Receiver]]:
    """Runs a cluster whose spans go through a real collector."""
    with (
        receiver() as found,
        collector(found) as endpoint,
        LocalServer(
            [MODEL, "--prefill", "2", *SMALL, "--otlp-traces-endpoint", endpoint]
        ) as server,
    ):
        yield server, found


def complete(server: LocalServer, trace_id: str = TRACE, flags: str = "01", **more: Any) -> None:
    body = {
        "prompt": [(7 * i) % 250 for i in range(300)],
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
    }
    headers = {"traceparent": f"00-{trace_id}-{PARENT}-{flags}"} if trace_id else {}
    url = f"{server.url}/v1/completions"
    answer = fresh.post(url, json=body | more, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text


def by_name(spans: list[Span]) -> dict[str, Span]:
    return {span.name: span for span in spans}


def counter(server: LocalServer, name: str) -> float:
    text = fresh.get(f"{server.url}/metrics", timeout=60).text
    found = re.search(rf"^{name}_total{{[^}}]*}} (\S+)$", text, re.M)
    assert found is not None
    return float(found[1])


def test_the_stages_of_a_request_arrive_under_the_clients_span(
    traced: tuple[LocalServer, Receiver],
) -> None:
    server, found = traced
    complete(server)
    spans = found.trace(TRACE)
    named = by_name(spans)
    root = named["llm_request"]
    assert root.parent_id == PARENT and root.service == "moonpool"
    assert root.attributes["gen_ai.usage.prompt_tokens"] == 300
    assert root.attributes["gen_ai.usage.completion_tokens"] == 4
    assert root.attributes["moonpool.outcome"] == "length"
    for name in STAGES:
        assert named[name].parent_id == root.span_id, name
        assert root.begin_ns <= named[name].begin_ns <= named[name].end_ns <= root.end_ns
    stages_ns = sum(named[name].end_ns - named[name].begin_ns for name in STAGES)
    assert abs(stages_ns - (root.end_ns - root.begin_ns)) < 1e6
    assert abs(root.end_ns / 1e9 - time.time()) < PATIENCE_S


def test_workers_report_their_parts(traced: tuple[LocalServer, Receiver]) -> None:
    server, found = traced
    trace_id = "1" * 32
    complete(server, trace_id, prompt=[(11 * i) % 250 for i in range(299)])
    spans = found.trace(trace_id)
    named = by_name(spans)
    chunks = [span for span in spans if span.name == "prefill_chunk"]
    assert len(chunks) >= 2, "299 tokens in chunks of 128"
    assert sum(span.attributes["moonpool.tokens"] for span in chunks) == 299
    assert {span.parent_id for span in chunks} == {named["prefill"].span_id}
    assert all(span.attributes["moonpool.instance"].startswith("prefill-") for span in chunks)
    moved = named["kvcache_transfer"]
    assert moved.attributes["moonpool.instance"] == "decode-0"
    assert moved.attributes["moonpool.bytes"] > 0
    assert moved.parent_id == named["handover"].span_id


def test_answers_of_one_call_have_spans_of_their_own(
    traced: tuple[LocalServer, Receiver],
) -> None:
    server, found = traced
    trace_id = "2" * 32
    complete(server, trace_id, n=2, temperature=1)
    spans = found.trace(trace_id, num_roots=2)
    assert len({span.span_id for span in spans if span.name == "llm_request"}) == 2
    assert len({span.span_id for span in spans}) == len(spans)


def test_what_the_client_does_not_sample_is_not_sent(
    traced: tuple[LocalServer, Receiver],
) -> None:
    server, found = traced
    complete(server, "3" * 32, "00")
    complete(server, "4" * 32)
    found.trace("4" * 32)
    assert not [span for span in found.spans if span.trace_id == "3" * 32]


def test_a_call_without_a_header_begins_a_trace(traced: tuple[LocalServer, Receiver]) -> None:
    server, found = traced
    before = {span.trace_id for span in found.spans}
    complete(server, "")
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        new = [s for s in found.spans if s.trace_id not in before and s.name == "llm_request"]
        if new:
            break
        time.sleep(0.05)
    assert new and new[0].parent_id == ""
    assert counter(server, "moonpool:trace_spans") >= 6


@pytest.mark.long
def test_a_collector_that_is_gone_costs_spans_and_no_answers() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    endpoint = f"http://127.0.0.1:{free_port()}"
    with LocalServer([MODEL, *SMALL, "--otlp-traces-endpoint", endpoint]) as server:
        complete(server)
        complete(server, "5" * 32)
        until_s = time.monotonic() + PATIENCE_S
        while counter(server, "moonpool:lost_trace_spans") < 1 and time.monotonic() < until_s:
            time.sleep(0.2)
        assert counter(server, "moonpool:lost_trace_spans") >= 6
        assert counter(server, "moonpool:trace_spans") == 0


@pytest.mark.long
def test_the_context_is_passed_on_to_an_engine() -> None:
    """The engine is a moonpool server, which speaks vLLM's API and writes traces without vLLM."""
    with (
        receiver() as found,
        LocalServer(
            [ENGINE, "--mixed", "1", *SMALL, "--otlp-traces-endpoint", found.endpoint]
        ) as engine,
        LocalServer(["--vllm", engine.url]) as silent_front,
        LocalServer(
            ["--vllm", engine.url, "--otlp-traces-endpoint", found.endpoint]
        ) as traced_front,
    ):
        complete(silent_front, "6" * 32)
        (passed,) = [s for s in found.trace("6" * 32) if s.name == "llm_request"]
        assert passed.parent_id == PARENT, "a front without spans stays out of the trace"
        complete(traced_front, "7" * 32)
        requests = [s for s in found.trace("7" * 32, num_roots=2) if s.name == "llm_request"]
        outer = next(span for span in requests if span.parent_id == PARENT)
        assert next(s for s in requests if s is not outer).parent_id == outer.span_id
