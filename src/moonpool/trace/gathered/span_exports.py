"""Exports of OpenTelemetry as JSON lines: in each a batch of spans, of any programs.

The spans of a program share `gen_ai.conversation.id`, `session.id`, or else their trace. A span
that has tokens is a call, unless it is an agent's or a workflow's around calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from moonpool.trace.corpora import CallSpan, calls_of, line_object, session_rows
from moonpool.trace.gathered.rows import Gatherer
from moonpool.trace.programs import SESSION_BLOCK_TOKENS
from moonpool.trace.row import LineError, ParsedRow

_PROGRAM = ("gen_ai.conversation.id", "session.id", "traceId", "trace_id")
_ID, _PARENT = ("spanId", "span_id"), ("parentSpanId", "parent_span_id")
_KEPT = (
    "gen_ai.usage.",
    "llm.token_count.",
    "gen_ai.input.",
    "gen_ai.prompt",
    "gen_ai.system_instructions",
    "gen_ai.tool.definitions",
    "input.",
    "llm.input_",
)
_AROUND = ("invoke_agent", "create_agent", "invoke_workflow", "execute_tool")


def is_span_export(first: dict[str, Any]) -> bool:
    """Whether a file's first object is a batch of spans."""
    return isinstance(first.get("resourceSpans", first.get("resource_spans")), list)


class SpanExport(Gatherer):
    """The calls of a file by their programs."""

    format = "otlp"
    block_tokens = SESSION_BLOCK_TOKENS
    units_per_s = 1.0

    def __init__(self) -> None:
        self.other_lines = 0
        self._calls: dict[str, list[CallSpan]] = {}
        self._parents: dict[str, str] = {}

    def add(self, line: bytes) -> None:
        """Raises LineError."""
        whole = line_object(line)
        if not is_span_export(whole):
            self.other_lines += 1
            if not whole.keys() & {"resourceLogs", "resourceMetrics"}:
                names = ", ".join(map(str, list(whole)[:5])) or "nothing"
                raise LineError(f"a line of OpenTelemetry needs resourceSpans; found are {names}")
            return
        for span in _spans(whole):
            self.keep()
            name, parent = _first(span, _ID), _first(span, _PARENT)
            if name and parent:
                self._parents[name] = parent
            for begin_s, end_s, _, attributes in calls_of([span]):
                if attributes.get("gen_ai.operation.name") in _AROUND:
                    continue
                program = _first(attributes, _PROGRAM)
                if not program:
                    raise LineError("a span with tokens has no traceId")
                self._calls.setdefault(program, []).append(
                    (begin_s, end_s, {"name": name}, _kept(attributes))
                )

    def rows(self) -> Iterator[ParsedRow]:
        """Raises LineError."""
        around = self._around_calls()
        found = {
            program: [call for call in calls if call[2]["name"] not in around]
            for program, calls in self._calls.items()
        }
        by_time = sorted(found.items(), key=lambda one: min(call[0] for call in one[1]))
        for program, calls in by_time:
            yield from session_rows(program, calls, exact=True)

    def _around_calls(self) -> set[str]:
        """Returns the spans that contain a call, whose figures are sums over their calls."""
        found: set[str] = set()
        for calls in self._calls.values():
            for call in calls:
                name = self._parents.get(call[2]["name"], "")
                while name and name not in found:
                    found.add(name)
                    name = self._parents.get(name, "")
        return found


def _spans(whole: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for resource in whole.get("resourceSpans") or whole.get("resource_spans") or []:
        inner = resource if isinstance(resource, dict) else {}
        for scope in inner.get("scopeSpans") or inner.get("scope_spans") or []:
            for span in (scope if isinstance(scope, dict) else {}).get("spans") or []:
                if not isinstance(span, dict):
                    raise LineError("a span is no object")
                yield span


def _first(fields: dict[str, Any], names: tuple[str, ...]) -> str:
    return next((str(fields[name]) for name in names if fields.get(name)), "")


def _kept(attributes: dict[str, Any]) -> dict[str, Any]:
    """Returns the part of a file's spans from which the rows are made."""
    return {name: value for name, value in attributes.items() if name.startswith(_KEPT)}
