"""Reads traces of agents: which call waits for which, in all forms that moonpool reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moonpool.trace.builtin import BUILT_IN
from moonpool.trace.generate import generate
from moonpool.trace.jsonl import write_trace
from moonpool.trace.reader import Trace, open_trace
from moonpool.trace.row import TraceError, TraceRow

TEXT = "You are an agent. " * 40


def read(folder: Path, *lines: Any) -> list[TraceRow]:
    return list(opened(folder, *lines))


def opened(folder: Path, *lines: Any) -> Trace:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return open_trace(path)


def test_aiperf_sessions_add_to_their_prompts(tmp_path: Path) -> None:
    rows = read(
        tmp_path,
        {"session_id": "a", "input_length": 700.0, "output_length": 40},
        {"session_id": "b", "text_input": TEXT, "output_length": 9},
        {"session_id": "a", "input_length": 150, "output_length": 20.0, "delay": 2500},
        {"session_id": "b", "text_input": "go on", "output_length": 9},
    )
    first, second = (row for row in rows if row.session == "a")
    assert (first.after, second.after, second.delay_s) == ((), (first.call,), 2.5)
    assert (first.input_tokens, second.input_tokens) == (700, 700 + 40 + 150)
    assert second.hash_ids[:10] == first.hash_ids[:10]  # 640 tokens, in blocks of 64
    text, after = (row for row in rows if row.session == "b")
    assert text.input_tokens == -(-len(TEXT) // 4)
    assert (after.after, after.delay_s) == ((text.call,), 0.0)
    assert after.hash_ids[:2] == text.hash_ids[:2] != first.hash_ids[:2]


def test_equal_texts_begin_with_equal_blocks(tmp_path: Path) -> None:
    one, other, third = read(
        tmp_path,
        *({"session_id": name, "text_input": TEXT + name, "output_length": 9} for name in "ab"),
        {"timestamp": 5, "text_input": "x" + TEXT, "output_length": 9},
    )
    assert one.hash_ids[:2] == other.hash_ids[:2]
    assert third.hash_ids[0] != one.hash_ids[0]


def test_dynamo_rows_wait_for_all_that_they_name(tmp_path: Path) -> None:
    shape = {"input_length": 600, "output_length": 5}
    trace = opened(
        tmp_path,
        {"request_id": "a", "session_id": "s", "timestamp": 5.5, "hash_ids": [1, 2], **shape},
        {"request_id": "z", "session_id": "t", "timestamp": 1, "hash_ids": [7, 8], **shape},
        {
            "request_id": "b",
            "session_id": "s",
            "wait_for": ["a", "z"],
            "hash_ids": [1, 3],
            "delay": 10,
            "tool_wait_ms": 3.5,
            **shape,
        },
    )
    assert trace.info.has_programs and trace.info.block_tokens == 512
    rows = list(trace)
    assert [row.call for row in rows] == ["z", "a", "b"]
    assert rows[2].after == ("a", "z") and rows[2].delay_s == pytest.approx(0.0135)
    assert rows[2].arrived_s == rows[1].arrived_s == pytest.approx(0.0045)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([{"request_id": "a", "wait_for": ["b"]}], ":1: it waits for the call 'b'"),
        ([{"request_id": "a"}, {"request_id": "a"}], ":2: another row has the request_id 'a'"),
        ([{"session_id": "a", "delay": -1}], ":1: delay is -1; it must be a finite number"),
        ([{"session_id": "a", "input_length": 1.5}], ":1: input_length is 1.5; it must be an int"),
        ([{"delay": 4}], ":1: this row has neither a timestamp nor a session_id or request_id"),
    ],
)
def test_wrong_rows_are_named(tmp_path: Path, rows: list[dict[str, Any]], text: str) -> None:
    shape = {"input_length": 30, "output_length": 5}
    with pytest.raises(TraceError) as caught:
        read(tmp_path, *(shape | row for row in rows))
    assert text in str(caught.value)


def weka(name: str, *requests: dict[str, Any]) -> dict[str, Any]:
    return {"id": name, "block_size": 64, "tool_tokens": 128, "requests": list(requests)}


def request(num_tokens: int, *ids: int, **fields: Any) -> dict[str, Any]:
    return {"t": 0.0, "type": "n", "in": num_tokens, "out": 9, "hash_ids": list(ids), **fields}


def test_wekas_conversations_with_sub_agents(tmp_path: Path) -> None:
    inner = [request(150, 9, 8), request(160, 9, 8, think_time=1.0)]
    agent = {"type": "subagent", "t": 2.0, "agent_id": "x", "requests": inner}
    rows = read(
        tmp_path,
        weka("one", request(200, 1, 2, 3), agent, request(260, 1, 2, 3, 4, think_time=4.0)),
        weka("two", request(200, 1, 2, 3)),
    )
    first, child, grown, last, other = rows
    assert child.after == (first.call,) and child.parent == "one"
    assert grown.after == (child.call,) and grown.delay_s == 1.0
    assert last.after == (first.call, grown.call) and last.delay_s == 4.0
    assert last.hash_ids[:3] == first.hash_ids[:3]
    assert other.hash_ids[:2] == first.hash_ids[:2]  # these blocks have the definitions of tools
    assert other.hash_ids[2] != first.hash_ids[2]
    assert len(first.hash_ids) == 4  # includes a partial last block


def test_spans_wait_for_those_that_had_ended(tmp_path: Path) -> None:
    def span(begin: float, end: float, num_input: int) -> dict[str, Any]:
        usage = {"gen_ai.usage.input_tokens": num_input, "gen_ai.usage.output_tokens": 7}
        return {"start_time": begin, "end_time": end, "attributes": usage}

    spans = [span(0, 4, 100), span(5, 9, 200), span(6, 8, 150), span(10, 12, 400)]
    tool = {"start_time": 4, "end_time": 5, "attributes": {}}
    rows = read(tmp_path, {"trace_id": "t", "spans": [*spans, tool]})
    assert [row.after for row in rows] == [(), ("t#0",), ("t#0",), ("t#1", "t#2")]
    assert [row.delay_s for row in rows] == [0.0, 1.0, 2.0, 1.0]


def test_our_own_log_gives_the_pauses(tmp_path: Path) -> None:
    def line(at: str, total_s: float) -> dict[str, Any]:
        figures = {"prompt_tokens": 90, "generated_tokens": 4, "outcome": "stop"}
        return {"time": at, "program": "p", "total_s": total_s, **figures}

    rows = read(tmp_path, line("2026-01-01T00:00:02Z", 2.0), line("2026-01-01T00:00:07.5Z", 1.5))
    assert rows[1].after == (rows[0].call,) and rows[1].delay_s == pytest.approx(4.0)


def test_generated_programs_survive_the_file(tmp_path: Path) -> None:
    made = list(generate(BUILT_IN["agents"], num_requests=80, seed=3, closed_loop=True))
    began_s = {row.call: row.arrived_s for row in made}
    assert made == sorted(made, key=lambda row: row.arrived_s)
    assert all(row.arrived_s == max(map(began_s.get, row.after)) for row in made if row.after)
    path = tmp_path / "made.jsonl"
    assert write_trace(made, path) == 80
    read_again = list(open_trace(path))
    assert [(r.call, r.after, r.session, r.hash_ids) for r in read_again] == [
        (r.call, r.after, r.session, r.hash_ids) for r in made
    ]
    assert [r.delay_s for r in read_again] == pytest.approx([r.delay_s for r in made])
    assert sum(not row.after for row in made) == len({row.session for row in made}) > 1
