"""Tests odd but legal rows of agents, in all forms: their token counts, and which call waits for
which."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.trace.programs import CallGraph
from moonpool.trace.reader import Trace, open_trace
from moonpool.trace.row import ParsedRow, TraceError, TraceRow

TEXT = "You are an agent. " * 40
SHAPE = {"input_length": 600, "output_length": 5}


def opened(folder: Path, *lines: Any) -> Trace:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return open_trace(path)


def read(folder: Path, *lines: Any) -> dict[str, TraceRow]:
    """Returns the rows by their calls, after a check of the order that players rely on."""
    rows = list(opened(folder, *lines))
    seen: set[str] = set()
    for before, row in pairwise(rows):
        assert before.arrived_s <= row.arrived_s
    for row in rows:
        assert seen >= set(row.after)
        assert row.call not in seen
        assert row.arrived_s >= 0 and row.input_tokens > 0 and row.output_tokens > 0
        seen.add(row.call)
    return {row.call: row for row in rows}


# Rows of AIPerf:


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text} for text in texts]


def test_messages_are_the_whole_prompt_or_what_is_new(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "look"}}]
    rows = read(
        tmp_path,
        {"session_id": "a", "messages": chat(TEXT), "output_length": 50, "tools": tools},
        {"session_id": "a", "messages": chat(TEXT, "b" * 400), "delay": 4503.332, "tools": tools},
        {"session_id": "d", "messages": chat(TEXT), "message_mode": "delta", "tools": None},
        {"session_id": "d", "messages": chat("b" * 400), "message_mode": "delta", "delay": None},
    )
    whole, grown = rows["a#1"], rows["a#2"]
    assert grown.after == ("a#1",) and grown.delay_s == pytest.approx(4.503332)
    assert 100 <= grown.input_tokens - whole.input_tokens <= 104
    assert grown.hash_ids[:2] == whole.hash_ids[:2]
    delta, added = rows["d#1"], rows["d#2"]
    assert added.input_tokens == pytest.approx(delta.input_tokens + 1 + 102, abs=2)
    assert added.hash_ids[:2] == delta.hash_ids[:2] != whole.hash_ids[:2]


def test_payloads_are_sent_as_they_are(tmp_path: Path) -> None:
    rows = list(
        opened(
            tmp_path,
            {"timestamp": 0, "payload": {"prompt": "x" * 800, "max_tokens": 7}},
            {"timestamp": 1, "payload": {"prompt": list(range(200)), "max_tokens": 7.0}},
            {"timestamp": 2, "payload": {"messages": chat("x" * 800)}, "output_length": 3.0},
        )
    )
    assert [row.input_tokens for row in rows] == [200, 200, pytest.approx(202, abs=2)]
    assert [row.output_tokens for row in rows] == [7, 7, 3]
    assert len({row.hash_ids[0] for row in rows}) == 3


def test_an_empty_text_in_a_session_is_a_call(tmp_path: Path) -> None:
    rows = read(
        tmp_path,
        {"session_id": "a", "text_input": TEXT, "output_length": 10},
        {"session_id": "a", "text_input": "", "output_length": 10, "delay": 0},
        {"session_id": "b", "text_input": "", "output_length": 10},
        {"session_id": "b", "text_input": TEXT, "output_length": 10, "delay": 500},
    )
    assert rows["a#2"].input_tokens == rows["a#1"].input_tokens + 10
    assert rows["b#1"].after == () and rows["b#1"].input_tokens == 180


def test_turns_with_times_go_on_from_each_other(tmp_path: Path) -> None:
    rows = read(
        tmp_path,
        {"timestamp": 0, "session_id": "a", "text_input": TEXT, "output_length": 10},
        {"timestamp": 9000.5, "session_id": "a", "text_input": "x" * 4000, "output_length": 10},
    )
    assert rows["a#2"].input_tokens == rows["a#1"].input_tokens + 10 + 1000
    assert rows["a#2"].arrived_s == pytest.approx(9.0005)


def test_rows_by_themselves_share_nothing(tmp_path: Path) -> None:
    one, other, agent = opened(
        tmp_path,
        {"timestamp": 0, "input_length": 700.0, "output_length": 4},
        {"timestamp": 1, "input_length": 700.0, "output_length": 4},
        {"timestamp": 2, "session_id": "s", "text_input": TEXT, "output_length": 4},
    )
    assert not one.hash_ids and not other.hash_ids and agent.hash_ids


def test_rows_without_hashes_stand_beside_others(tmp_path: Path) -> None:
    rows = read(
        tmp_path,
        {"session_id": "a", **SHAPE, "hash_ids": [-5, 2**64 - 1]},
        {"session_id": "a", **SHAPE, "hash_ids": [-5, 7], "delay": 1},
        {"session_id": "b", **SHAPE, "hash_ids": []},
        {"session_id": "b", "input_length": 100, "output_length": 5, "delay": 1, "hash_ids": None},
    )
    assert rows["a#1"].hash_ids[0] == rows["a#2"].hash_ids[0] >= 0
    assert rows["b#2"].input_tokens == 705 and len(rows["b#2"].hash_ids) == 2
    assert rows["b#2"].hash_ids[0] == rows["b#1"].hash_ids[0] != rows["a#1"].hash_ids[0]


def test_sessions_of_one_call_begin_at_once(tmp_path: Path) -> None:
    rows = read(tmp_path, *({"session_id": name, **SHAPE} for name in ("ü", "日本", "a b")))
    assert [row.arrived_s for row in rows.values()] == [0.0] * 3


def test_conversations_of_turns(tmp_path: Path) -> None:
    rows = read(
        tmp_path,
        {
            "session_id": "a",
            "turns": [
                {"role": "system", "text": TEXT},
                {"texts": ["x" * 40, "y" * 40], "output_length": 6.0, "image": "data:..."},
                {"texts": [{"name": "t", "contents": ["z" * 400]}], "delay": 1500.5},
                {"text": "", "delay": 0},
            ],
        },
        {"turns": [{"text": TEXT, "timestamp": 0}, {"text": "x", "timestamp": 2000}]},
        {"session_id": "a", "turns": [{"text": "later", "delay": None}]},
    )
    a = [row for row in rows.values() if row.session == "a"]
    assert [row.input_tokens for row in a] == [200, 306, 307, 310]
    assert [row.delay_s for row in a] == [0.0, 1.5005, 0.0, 0.0]
    assert a[3].after == (a[2].call,)
    timed = [row for row in rows.values() if row.session != "a"]
    assert timed[1].after == (timed[0].call,) and timed[1].delay_s == 2.0


# Rows of Dynamo:


def test_a_call_may_wait_for_later_lines(tmp_path: Path) -> None:
    rows = read(
        tmp_path,
        {"request_id": "join", "session_id": "p", "wait_for": ["c2", "b"], "delay": 3, **SHAPE},
        {"request_id": "c2", "session_id": "child", "wait_for": ["c1"], **SHAPE},
        {"request_id": "c1", "session_id": "child", "wait_for": ["a"], "delay": 0, **SHAPE},
        {"request_id": "b", "session_id": "p", "wait_for": ["a"], "tool_wait_ms": 4, **SHAPE},
        {"request_id": "z", "session_id": "q", "timestamp": 10.5, **SHAPE},
        {"request_id": "a", "session_id": "p", "timestamp": 1000, **SHAPE},
    )
    assert next(iter(rows)) == "z"
    assert rows["join"].after == ("c2", "b") and rows["join"].arrived_s == rows["a"].arrived_s
    assert rows["c1"].parent == rows["c2"].parent == "p" and not rows["join"].parent
    assert rows["b"].hash_ids[0] == rows["a"].hash_ids[0] != rows["c1"].hash_ids[0]


def test_calls_that_wait_in_a_circle_or_for_none_are_named(tmp_path: Path) -> None:
    circle = [
        {"request_id": "a", "timestamp": 0, **SHAPE},
        {"request_id": "b", "wait_for": ["c"], **SHAPE},
        {"request_id": "c", "wait_for": ["b"], **SHAPE},
    ]
    with pytest.raises(TraceError, match=r":2: it waits for calls that wait for it"):
        opened(tmp_path, *circle)
    with pytest.raises(TraceError, match=r":1: it waits for the call 'x', which no line has"):
        opened(tmp_path, {"request_id": "a", "wait_for": ["x"], **SHAPE}, circle[0] | {"t": 1})


@pytest.mark.parametrize("step", [1, -1])
def test_calls_without_tokens_are_passed_over(tmp_path: Path, step: int) -> None:
    lines = [
        {"request_id": "z", "timestamp": 5, "input_length": 0, "output_length": 4},
        {"request_id": "a", "timestamp": 70, **SHAPE},
        {"request_id": "b", "wait_for": ["a"], "delay": 100, "input_length": 0, "output_length": 4},
        {"request_id": "c", "wait_for": ["b"], "delay": 20, "input_length": 9, "output_length": 0},
        {"request_id": "d", "wait_for": ["c"], "delay": 3, **SHAPE},
        {"request_id": "e", "wait_for": ["z"], "delay": 80, **SHAPE},
    ]
    trace = opened(tmp_path, *lines[::step])
    assert trace.info.skipped_rows == 3 and trace.info.duration_s == pytest.approx(0.015)
    rows = {row.call: row for row in trace}
    assert rows["a"].arrived_s == 0.0 and rows["e"].arrived_s == pytest.approx(0.015)
    assert rows["e"].after == ()
    assert rows["d"].after == ("a",) and rows["d"].delay_s == pytest.approx(0.123)
    assert rows["d"].session == rows["a"].session == "a"  # one program


def test_timed_rows_without_tokens_stay_out(tmp_path: Path) -> None:
    rows = list(
        opened(
            tmp_path,
            {"request_id": "a", "timestamp": 0, **SHAPE},
            {"request_id": "b", "timestamp": 5, "input_length": 0, "output_length": 5},
            {"timestamp": 6, "input_length": 5, "output_length": 0},
        )
    )
    assert [row.call for row in rows] == [""] or [row.input_tokens for row in rows] == [600]


HEADER = {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 100}
HEADER |= {"hash_id_scope": "local", "source": {"format": "test", "digest": "0"}}


def graph_row(name: str, *needs: tuple[str, str, float], **fields: Any) -> dict[str, Any]:
    dependencies = [
        {"request_id": one, "trigger": trigger, "delay_ms": ms, "relation": "sequence"}
        for one, trigger, ms in needs
    ]
    return {
        "request_id": name,
        "play_id": "p",
        "session_id": "p::0",
        "model": "m",
        "input_tokens": 150,
        "output_tokens": 5.0,
        "hash_ids": [1, 2**64 - 1],
        "not_before_ms": 7,
        "dependencies": dependencies,
    } | fields


def test_graphs_of_dynamo(tmp_path: Path) -> None:
    trace = opened(
        tmp_path,
        HEADER,
        graph_row("b", ("a", "completion", 5), ("k", "completion", 9.5)),
        graph_row("k", ("a", "dispatch", 200), session_id="p::1"),
        graph_row("l", ("b", "dispatch", 30), session_id="p::2"),
        graph_row("a", strict_priority=1),
        graph_row("o", play_id="q", session_id="q", not_before_ms=3, hash_ids=[1, 5]),
    )
    assert trace.info.block_tokens == 100 and trace.info.has_programs
    rows = {row.call: row for row in trace}
    assert rows["b"].after == ("a", "k") and rows["b"].delay_s == pytest.approx(0.0095)
    assert rows["l"].after == ("a", "k") and rows["l"].delay_s == pytest.approx(0.0395)
    assert rows["k"].after == () and rows["k"].arrived_s == pytest.approx(0.204)
    assert [rows[name].parent for name in "abkl"] == ["", "", "p::0", "p::0"]
    assert rows["a"].hash_ids == rows["b"].hash_ids
    assert rows["o"].hash_ids[0] not in rows["a"].hash_ids


# Corpora:


def weka(name: str, *requests: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"id": name, "block_size": 64, "requests": list(requests), **fields}


def request(num_tokens: float, *ids: int, **fields: Any) -> dict[str, Any]:
    return {"t": 0.0, "type": "s", "in": num_tokens, "out": 9, "hash_ids": list(ids), **fields}


def test_wekas_conversations_of_two_files_may_have_one_name(tmp_path: Path) -> None:
    one = weka("one", request(130.0, 1, 2, 3), request(130, 1, 2, 4, think_time=-0.001))
    rows = read(tmp_path, one, one, weka("one~2", request(64, 1)))
    assert len({row.session for row in rows.values()}) == 3
    first, again = rows["one#0"], rows["one~2#0"]
    assert not set(first.hash_ids) & set(again.hash_ids)
    assert rows["one#1"].delay_s == 0.0


def test_wekas_global_ids_are_shared_and_missing_ones_made(tmp_path: Path) -> None:
    rows = read(
        tmp_path,
        weka("a", request(128, 1, 2), hash_id_scope="global"),
        weka("b", request(128, 1, 3), request(200), request(260), hash_id_scope="global"),
        weka("c", hash_id_scope="global"),
    )
    assert rows["a#0"].hash_ids[0] == rows["b#0"].hash_ids[0]
    assert rows["b#1"].hash_ids[:3] == rows["b#2"].hash_ids[:3]


def test_wekas_sub_agents_may_come_first_and_run_on(tmp_path: Path) -> None:
    def sub(name: str, **fields: Any) -> dict[str, Any]:
        inner = [request(64, 9)]
        return {"type": "subagent", "t": 0.0, "agent_id": name, "requests": inner, **fields}

    late = sub("y", status="async_launched")
    rows = read(tmp_path, weka("w", sub("x"), request(64, 1), late, request(64, 2)))
    first, second = rows["w#1"], rows["w#3"]
    assert first.after == ("w/x.0#0",) and second.after == ("w#1",)
    assert rows["w/y.2#0"].after == ("w#1",) and rows["w/y.2#0"].parent == "w"


def test_a_long_conversation_is_one_line(tmp_path: Path) -> None:
    calls = [request(64, 1), request(64, 2) | {"note": "x" * (9 << 20)}]
    assert len(read(tmp_path, weka("long", *calls))) == 2


def span(begin: Any, end: Any, num_input: Any = 100) -> dict[str, Any]:
    usage = {"gen_ai.usage.input_tokens": num_input, "gen_ai.usage.output_tokens": "7"}
    return {"start_time": begin, "end_time": end, "attributes": usage}


def test_sessions_of_spans_begin_at_their_times(tmp_path: Path) -> None:
    at = "2026-01-01T00:00:%02d.123456789Z"
    epoch = 1767225600
    rows = read(
        tmp_path,
        {"trace_id": "b", "spans": [span(at % 30, at % 31), span(at % 40, None, 9.0)]},
        {"trace_id": "a", "spans": [span(f"{epoch + 10}000000000", (epoch + 12) * 10**9)]},
        {"trace_id": "a", "spans": [span(epoch + 20, ""), span(epoch + 25, epoch + 26, 0)]},
        {"trace_id": "c", "spans": []},
        {"trace_id": "d", "spans": [span(epoch + 50, None), span(epoch + 60, None)]},
    )
    arrived = {name: row.arrived_s for name, row in rows.items()}
    assert list(arrived) == ["a#0", "a~2#0", "b#0", "b#1", "d#0", "d#1"] or arrived["a#0"] == 0
    assert sorted(arrived.values()) == pytest.approx([0, 10, 20.1234, 20.1234, 40, 40], abs=1e-3)
    assert rows["d#1"].after == ("d#0",) and rows["d#1"].delay_s == pytest.approx(10.0)


def test_spans_side_by_side_begin_together(tmp_path: Path) -> None:
    rows = read(tmp_path, {"trace_id": "t", "spans": [span(1, 5), span(2, 3), span(6, 7)]})
    assert (rows["t#0"].after, rows["t#1"].after, rows["t#2"].after) == ((), (), ("t#0", "t#1"))
    assert rows["t#0"].arrived_s == rows["t#1"].arrived_s == 0.0 and rows["t#2"].delay_s == 1.0


@pytest.mark.long
def test_sessions_of_many_spans_are_read(tmp_path: Path) -> None:
    spans = [span(number, number + 0.5) for number in range(20_000)]
    rows = read(tmp_path, {"trace_id": "t", "spans": spans})
    assert rows["t#19999"].after == ("t#19998",)


@pytest.mark.parametrize("value", [700.5, True, "many", -1, "1e400"])
def test_wrong_tokens_of_a_span_are_named(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TraceError, match=r":1: gen_ai\.usage\.input_tokens is"):
        opened(tmp_path, {"trace_id": "t", "spans": [span(0, 1, value)]})


# Order:


@st.composite
def shuffled(draw: st.DrawFn) -> list[ParsedRow]:
    size = draw(st.integers(1, 12))
    rows = []
    for number in range(size):
        before = draw(st.sets(st.integers(0, number - 1), max_size=3)) if number else set()
        after = tuple(str(one) for one in sorted(before))
        time = draw(st.integers(0, 9)) if not after else float("-inf")
        session = draw(st.sampled_from(["", "s"]))
        rows.append(ParsedRow(time, 9, 9, session=session, call=str(number), after=after))
    return draw(st.permutations(rows))


@given(shuffled())
def test_no_row_comes_before_those_it_waits_for(rows: list[ParsedRow]) -> None:
    graph = CallGraph()
    for row in rows:
        graph.add(row)
    placed = [rows[number] for number in graph.order()]
    assert sorted(row.call for row in placed) == sorted(row.call for row in rows)
    seen: set[str] = set()
    for row in placed:
        assert seen >= set(row.after)
        seen.add(row.call)
    roots = [row.time for row in placed if not row.after]
    assert roots == sorted(roots)


# Plain rows of Mooncake:


def test_plain_rows_may_have_float_lengths_nulls_and_dates(tmp_path: Path) -> None:
    row = {"input_length": 700.0, "output_length": 4.0, "hash_ids": [-1, 2**63], "tenant": None}
    one, other = opened(
        tmp_path,
        {"timestamp": "2026-01-01T00:00:00Z", "session_id": None, "priority": None, **row},
        {"timestamp": "2026-01-01T00:00:01.5+00:00", "slo_class": None, **row},
    )
    assert (one.input_tokens, other.output_tokens) == (700, 4)
    assert other.arrived_s == pytest.approx(1.5)
    assert one.hash_ids == other.hash_ids and min(one.hash_ids) >= 0
    with pytest.raises(TraceError, match=r":1: input_length is 700\.5; it must be an integer"):
        opened(tmp_path, {"timestamp": 0, **row, "input_length": 700.5})
