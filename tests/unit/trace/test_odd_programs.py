"""Tests files of programs with unusual but legal contents, and that omitted lines are counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moonpool.trace.reader import Trace, open_trace
from moonpool.trace.row import TraceError

NAME = "Grüße 日本語 \u2028\0x"


def opened(folder: Path, *lines: Any) -> Trace:
    """Opens a trace from a file like those of some programs: with a byte-order mark at its start,
    CRLF, and plain Unicode."""
    path = folder / "trace.jsonl"
    text = "".join(json.dumps(line, ensure_ascii=False) + "\r\n" for line in lines)
    path.write_bytes(text.encode("utf-8-sig"))
    return open_trace(path)


def test_a_session_whose_first_call_is_empty_begins_at_its_time(tmp_path: Path) -> None:
    trace = opened(
        tmp_path,
        {"session_id": NAME, "timestamp": 0, "input_length": 700.0, "output_length": 20},
        {"session_id": "z", "timestamp": 500, "input_length": 0, "output_length": 5},
        {"session_id": "z", "delay": 10, "input_length": 50, "output_length": 5},
    )
    rows = list(trace)
    assert (trace.info.num_rows, trace.info.skipped_rows) == (2, 1)
    assert [(row.session, row.arrived_s) for row in rows] == [(NAME, 0.0), ("z", 0.51)]


def test_empty_calls_within_a_line_are_counted(tmp_path: Path) -> None:
    requests = [{"t": 0, "in": 640.0, "out": 5}, {"t": 1, "in": 0, "out": 5}]
    requests.append({"t": 9, "in": 700, "out": 5, "think_time": 1e6})
    trace = opened(tmp_path, {"id": NAME, "block_size": 64, "requests": requests})
    rows = list(trace)
    assert (trace.info.num_rows, trace.info.skipped_rows) == (len(rows), 1) == (2, 1)
    assert rows[1].after == (rows[0].call,) and rows[1].delay_s == 1e6
    said = [{"from": who, "value": text} for who, text in (("human", "q"), ("gpt", ""))]
    said += [{"from": "human", "value": "q2"}, {"from": "gpt", "value": "answer"}]
    trace = opened(tmp_path, {"id": "s", "conversations": said})
    assert (len(list(trace)), trace.info.skipped_rows) == (1, 1)


def span(begin_s: float, end_s: float, **attributes: Any) -> dict[str, Any]:
    found = {f"gen_ai.usage.{name}_tokens": value for name, value in attributes.items()}
    return {"start_time": begin_s, "end_time": end_s, "attributes": found}


def test_calls_that_failed_are_pauses_and_counted(tmp_path: Path) -> None:
    spans = [span(0, 2, input=100, output=9), span(3, 4, input=100), span(5, 7, input=90, output=1)]
    trace = opened(tmp_path, {"trace_id": "t", "spans": [*spans, {"name": "tool"}]})
    first, second = trace
    assert trace.info.skipped_rows == 1
    assert second.after == (first.call,) and second.delay_s == pytest.approx(3.0)


def test_times_of_two_clocks_are_refused(tmp_path: Path) -> None:
    lines = [{"trace_id": "t", "spans": [span(at, at + 1, input=9, output=9)]} for at in (5, 2e9)]
    with pytest.raises(TraceError, match="partly from 1970"):
        opened(tmp_path, *lines)


def test_what_stands_before_the_messages_is_shared(tmp_path: Path) -> None:
    """Instructions and tools, which have separate attributes in the semantic conventions, must be
    read, too."""
    blocks = []
    for name in ("a", "b"):
        one = span(0, 1, input=1024, output=9)
        one["attributes"]["gen_ai.system_instructions"] = [{"type": "text", "content": "s" * 4096}]
        one["attributes"]["gen_ai.input.messages"] = [{"role": "user", "parts": [name * 99]}]
        blocks.append({"trace_id": name, "spans": [one]})
    first, second = opened(tmp_path, *blocks)
    assert first.hash_ids[:8] == second.hash_ids[:8]
    assert first.hash_ids[-1] != second.hash_ids[-1]


def test_custom_files_of_vllm_have_columns_of_their_own(tmp_path: Path) -> None:
    trace = opened(
        tmp_path,
        {"id": 1, "prompt": "w" * 100, "output_tokens": "19", "category": "qa"},
        {"id": 2, "prompt": NAME, "output_tokens": 12.0},
    )
    assert [row.output_tokens for row in trace] == [19, 12]
    assert (trace.info.format, trace.info.ignored) == ("prompts", ("id", "category"))
    with pytest.raises(TraceError, match="a log needs"):
        opened(tmp_path, {"time": "2026-01-01", "prompt": "text of a log", "level": "info"})
