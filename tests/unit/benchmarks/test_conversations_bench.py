"""Tests the common parts of the benchmarks of live conversations, without a cluster: sessions,
names, files, verdicts."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from benchmarks.errors import BenchError
from benchmarks.page_live import conversation_rows
from benchmarks.suite.conversations.arrangements import (
    GROUPS,
    PLANNED,
    Machine,
    parse_arrangement,
)
from benchmarks.suite.conversations.basis import SessionBasis, planned_for
from benchmarks.suite.conversations.bench import (
    conversation_runs,
    verdict_lines,
)
from benchmarks.suite.conversations.forecast import write_session_trace
from benchmarks.suite.conversations.player import PlayedTurn, program_figures, run_figures
from benchmarks.suite.conversations.program_call import ProgramCall
from benchmarks.suite.conversations.sessions import (
    SESSION_SHAPES,
    TRACE_BLOCK_TOKENS,
    arriving_sessions,
    reusable_share,
    trace_rows,
)
from moonpool.api.program_identity import program_of
from moonpool.config.tables import ConfigError
from moonpool.request_record import RequestRecord
from moonpool.trace.reader import open_trace
from moonpool.types import ProgramContext, RequestId, Slo

SLO = Slo(ttft_s=1.0, tbt_s=0.1)
ORIGIN = {"command": "test"}


@pytest.mark.parametrize(("name", "share"), [("chats", 0.4), ("agents", 0.9)])
def test_sessions_repeat_the_stated_share(name: str, share: float) -> None:
    shape = SESSION_SHAPES[name]
    sessions = arriving_sessions(shape, 2.0, 200.0, seed=3)
    assert reusable_share(shape, sessions) == pytest.approx(share, abs=0.03)
    assert len(sessions) / 200.0 == pytest.approx(2.0, rel=0.2)


def test_a_load_is_the_same_for_all_systems() -> None:
    shape = SESSION_SHAPES["agents"]
    assert arriving_sessions(shape, 1.0, 30.0, 5) == arriving_sessions(shape, 1.0, 30.0, 5)
    assert arriving_sessions(shape, 1.0, 30.0, 5) != arriving_sessions(shape, 1.0, 30.0, 6)


def test_the_trace_shares_blocks_as_the_prompts_do(tmp_path: Path) -> None:
    shape = SESSION_SHAPES["agents"]
    sessions = arriving_sessions(shape, 1.0, 8.0, seed=1)
    rows = trace_rows(shape, sessions, 0.1, 0.01)
    shared = shape.shared_tokens // TRACE_BLOCK_TOKENS
    assert len({row.hash_ids[:shared] for row in rows}) == 1
    own = sorted((r for r in rows if r.session == "0"), key=lambda row: row.input_tokens)
    for before, after in pairwise(own):
        full = before.input_tokens // TRACE_BLOCK_TOKENS
        assert before.hash_ids[:full] == after.hash_ids[:full]
        assert after.arrived_s > before.arrived_s
    others = {i for row in rows if row.session != "0" for i in row.hash_ids[shared:]}
    assert not others & {i for row in own for i in row.hash_ids[shared:]}
    write_session_trace(rows, tmp_path / "trace.jsonl")
    trace = open_trace(str(tmp_path / "trace.jsonl"))
    assert (trace.info.num_rows, trace.info.block_tokens) == (len(rows), TRACE_BLOCK_TOKENS)


def test_names_of_arrangements() -> None:
    machine = Machine("m", kv_tokens=4096)
    cluster = parse_arrangement("2P+2D/early/random").cluster(machine, SLO)
    assert (cluster.prefill, cluster.decode, cluster.mixed) == (2, 2, 0)
    assert (cluster.admission, cluster.kv_tokens) == ("early", 1024)
    assert parse_arrangement("2P+2D/early/random").placement == "random"
    assert parse_arrangement("1P+1D+1M").mixed == 1
    peer = parse_arrangement("vllm-pair:128")
    assert (peer.shape, peer.batched_tokens, peer.knows_hits) == ("pair", 128, False)
    for name in (n for group in GROUPS.values() for n in group if n != PLANNED):
        parse_arrangement(name)


@pytest.mark.parametrize("name", ["", "P", "2P", "vllm-three", "vllm-one:x", "2M/best", "0M"])
def test_bad_names_say_what_is_allowed(name: str) -> None:
    with pytest.raises(ConfigError, match=r"use|is|stands"):
        parse_arrangement(name)


def test_the_plan_counts_for_so_many_instances() -> None:
    assert planned_for(2, ["1M", "1P+1D", "2M", "3M"]) == "2M"
    assert planned_for(2, ["1P+1D", "2P+1D"]) == "1P+1D"
    assert planned_for(2, ["1M", "", "10M"]) == ""


def _turn(ttft_s: float, gap_s: float, status: int = 200, reason: str = "length") -> PlayedTurn:
    record = RequestRecord(RequestId("1"), 100, SLO, 10.0)
    if status == 200:
        record.note_tokens(1, 10.0 + ttft_s)
        record.note_tokens(1, 10.0 + ttft_s + gap_s)
        record.cached_tokens = 40
    record.outcome = reason
    return PlayedTurn(record, 0.0, status, reason)


def test_figures_count_what_met_both_slos() -> None:
    played = [_turn(0.5, 0.05), _turn(2.0, 0.05), _turn(0.5, 0.2)]
    played += [_turn(0, 0, 429, "ttft_slo"), _turn(0, 0, 0, "connection")]
    found = run_figures(played, 10.0)
    assert (found["requests"], found["completed"], found["effective"]) == (5, 3, 1)
    assert (found["missed_ttft"], found["missed_tbt"]) == (1, 1)
    assert (found["rejected"], found["failed"], found["hit_ratio"]) == (1, 1, 0.4)
    assert run_figures([], 10.0)["hit_ratio"] == 0.0


def _call(program: int, step: int, status: int = 200, num_refused: int = 0) -> PlayedTurn:
    turn = _turn(0.5, 0.05, status, "length" if status == 200 else "programs_wait")
    turn.record.arrived_s += 20.0 * step
    turn.record.finished_s = turn.record.arrived_s + 4.0
    call = ProgramCall(program, step, step == 1)
    return replace(turn, num_refused=num_refused, call=call)


def test_a_program_takes_until_its_last_answer() -> None:
    played = [_call(0, 0), _call(1, 0, num_refused=2), _call(0, 1), _call(2, 0, 429, 12)]
    played += [_call(3, 0), _call(3, 1, 0), _turn(0.5, 0.05)]
    found = program_figures(played)
    assert found == {
        "begun": 4,
        # of the other sessions, one waits, one was refused, and the last answer of one broke off
        "finished": 1,
        "calls": 6,
        "refusals": 14,
        "makespan_s": {"p50": None, "p90": None},
    }
    assert program_figures(played[:1] + played[2:3])["makespan_s"] == {"p50": 24.0, "p90": 24.0}
    assert program_figures([])["begun"] == 0


def test_the_context_names_the_program_for_both_routers() -> None:
    given = ProgramCall(7, 3, True).xargs("run", 40)
    assert isinstance(given["agentic_context"], str), "vLLM takes no object in vllm_xargs"
    found = program_of({}, given)
    assert found == ProgramContext("run-7", blocks_parent=False, expected_tokens=40, ends=True)
    other = program_of({}, ProgramCall(7, 0, False).xargs("run", 40))
    assert other is not None and not other.ends


def _row(system: str, load: float, effective: int, **changes: Any) -> dict[str, Any]:
    row = {"model": "m", "workload": "chats", "system": system, "load": load, "client": "moonpool"}
    row |= {"effective": effective, "requests": 10, "rejected": 0, "hit_ratio": 0.4}
    spread = {"p50": 0.1, "p90": 0.2}
    return row | {"ttft_s": spread, "tbt_s": spread} | changes


def _basis() -> SessionBasis:
    simulated = {"1": {"2M": {"effective": 9, "requests": 10}, "1P+1D": {"effective": 5}}}
    return SessionBasis(SLO, {"moonpool": SLO}, 1.0, 2.0, 0.4, "2M", {}, simulated)


def test_runs_in_parts_fill_one_file(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    first = conversation_runs(path, ORIGIN)
    first.bases["m/chats"] = _basis()
    first.add(_row("2M", 1.0, 7))
    second = conversation_runs(path, ORIGIN)
    second.add(_row("vllm-two", 1.0, 4))
    second.add(_row("2M", 1.0, 8))
    third = conversation_runs(path, ORIGIN)
    assert [row["effective"] for row in third.rows] == [4, 8]
    assert third.bases == first.bases
    path.write_text("{}")
    with pytest.raises(BenchError, match="no file of this benchmark"):
        conversation_runs(path, ORIGIN)


def test_verdicts_name_what_was_said_and_what_won(tmp_path: Path) -> None:
    runs = conversation_runs(tmp_path / "runs.json", ORIGIN)
    runs.bases["m/chats"] = _basis()
    for row in (_row("2M", 1.0, 8), _row("1P+1D", 1.0, 6), _row("vllm-two", 1.0, 4)):
        runs.add(row)
    said, at_one = verdict_lines({"m/chats": {"planned": "2M", "simulated": {}}}, runs.rows)
    assert "planned beforehand 2M" in said
    assert "moonpool 2M with 8" in at_one and "2.00 times" in at_one
    found = {"bases": {"m/chats": {"planned": "2M", "simulated": {}}}, "rows": runs.rows}
    table = {row[1]: row for row in conversation_rows(found)}
    assert table["2M"][2] == "**8 of 10**" and table["2M"][-1] == "planned"
    assert table["vllm-two"][2] == "4 of 10"
