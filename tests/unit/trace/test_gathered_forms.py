"""Reads forms whose lines belong together: graphs of sessions, request traces, exports of spans,
and also plain prompts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moonpool.trace.reader import open_trace
from moonpool.trace.row import TraceError, TraceRow


def read(folder: Path, *lines: Any) -> tuple[str, dict[str, TraceRow]]:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = open_trace(path)
    rows = list(trace)
    seen: set[str] = set()
    for row in rows:
        assert seen >= set(row.after)
        seen.add(row.call)
    return trace.info.format, {row.call or str(i): row for i, row in enumerate(rows)}


def turn(text: str, **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 64, **more}


def test_sessions_fork_with_their_prompt_and_spawn_without(tmp_path: Path) -> None:
    kind, rows = read(
        tmp_path,
        {"session_id": "child", "turns": [turn("c" * 800)]},
        {
            "session_id": "root",
            "turns": [
                turn("r" * 4096, spawns=[{"children": ["child"], "join_at": 2}]),
                turn("x", delay=500),
                turn("y", forks=["leaf"]),
            ],
        },
        {"session_id": "leaf", "turns": [turn("z")]},
    )
    assert kind == "dag"
    assert rows["child#0"].after == ("root#0",) and rows["child#0"].parent == "root"
    assert rows["root#1"].after == ("root#0",) and rows["root#1"].delay_s == 0.5
    assert rows["root#2"].after == ("root#1", "child#0")
    assert rows["leaf#0"].after == ("root#2",)
    assert rows["leaf#0"].hash_ids[:16] == rows["root#0"].hash_ids[:16]
    assert not set(rows["child#0"].hash_ids) & set(rows["root#0"].hash_ids)


@pytest.mark.parametrize(
    ("sessions", "words"),
    [
        ({"a": ["b"], "b": ["a"]}, "one must begin"),
        ({"a": ["nowhere"]}, "which no line has"),
    ],
)
def test_wrong_graphs_are_named(tmp_path: Path, sessions: dict[str, Any], words: str) -> None:
    lines = [{"session_id": name, "turns": [turn("q", spawns=to)]} for name, to in sessions.items()]
    with pytest.raises(TraceError, match=words):
        read(tmp_path, *lines)


def answer(name: str, begun: int, ended: int, session: str = "", parent: str = "") -> Any:
    ids = [2**63 + 1, 2, 3]
    replay = {"trace_block_size": 64, "input_length": 130, "input_sequence_hashes": ids}
    request = {"request_id": name, "request_received_ms": begun, "output_tokens": 5}
    line = {"schema": "dynamo.request.trace.v1", "event_type": "request_end"}
    line |= {"event_time_unix_ms": ended, "request": {**request, "replay": replay}}
    agent = {"session_id": session, **({"parent_session_id": parent} if parent else {})}
    return {**line, "agent_context": agent} if session else line


def test_dynamos_request_traces(tmp_path: Path) -> None:
    tool = {"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "session_id": "s"}
    kind, rows = read(
        tmp_path,
        answer("a", 1000, 2000, "s"),
        tool,
        answer("c", 2100, 2500, "sub", "s"),
        {"timestamp": 1, "event": answer("b", 3000, 4000, "s")},
    )
    assert kind == "dynamo-requests"
    assert rows["c"].after == ("a",) and rows["c"].parent == "s"
    assert rows["b"].after == ("a", "c") and rows["b"].delay_s == pytest.approx(0.5)
    assert all(0 <= one < 2**63 for one in rows["a"].hash_ids)
    _, plain = read(tmp_path, answer("b", 1500, 2000), answer("a", 1000, 3000))
    assert [row.arrived_s for row in plain.values()] == [0.0, 0.5]


def span(name: str, parent: str, begin_s: int, end_s: int, operation: str = "chat") -> Any:
    found = {"gen_ai.usage.input_tokens": 100, "gen_ai.usage.output_tokens": 9}
    values = [{"key": key, "value": {"intValue": str(value)}} for key, value in found.items()]
    values.append({"key": "gen_ai.operation.name", "value": {"stringValue": operation}})
    base = 1_700_000_000
    return {
        "traceId": "t",
        "spanId": name,
        "parentSpanId": parent,
        "startTimeUnixNano": str((base + begin_s) * 10**9),
        "endTimeUnixNano": str((base + end_s) * 10**9),
        "attributes": values,
    }


def batch(*spans: Any) -> Any:
    return {"resourceSpans": [{"scopeSpans": [{"spans": list(spans)}]}]}


def test_exports_of_spans(tmp_path: Path) -> None:
    kind, rows = read(
        tmp_path,
        batch(span("2", "0", 5, 7)),
        batch(span("1", "0", 0, 2), span("0", "", 0, 9, "invoke_agent")),
    )
    assert kind == "otlp" and list(rows) == ["t#0", "t#1"]
    assert rows["t#1"].after == ("t#0",) and rows["t#1"].delay_s == pytest.approx(3.0)


def test_an_attribute_without_a_name_is_skipped(tmp_path: Path) -> None:
    nameless = span("1", "", 0, 2)
    nameless["attributes"] += [{"ke": "gen_ai.request.model"}, {"key": 3}]
    _, rows = read(tmp_path, batch(nameless))
    assert list(rows) == ["t#0"]


def test_plain_prompts_and_sharegpt(tmp_path: Path) -> None:
    kind, rows = read(tmp_path, {"text": "x" * 400}, {"texts": ["y" * 40], "timestamp": 100})
    assert kind == "prompts" and [row.input_tokens for row in rows.values()] == [100, 10]
    _, rows = read(tmp_path, {"prompt": "x" * 400, "output_tokens": 20})
    assert rows["0"].output_tokens == 20
    said = [{"from": who, "value": "w" * 400} for who in ("human", "gpt", "human", "gpt")]
    kind, rows = read(tmp_path, {"id": "s", "conversations": said})
    first, second = rows.values()
    assert kind == "sharegpt" and second.after == (first.call,)
    assert second.input_tokens == 2 * first.input_tokens + 100
