"""Tests the model of an engine's time behind routers, and the page of the results."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import page_routers
from benchmarks.errors import BenchError
from benchmarks.page_routers import SECTION, WORDS, router_rows, routers_section
from benchmarks.suite.routers.bench import router_runs
from benchmarks.suite.routers.engines import EngineFleet
from benchmarks.suite.routers.fronts import FRONT_NAMES, program_settings
from benchmarks.suite.routers.timed_engine import (
    EngineSize,
    EngineSpeed,
    TimedEngine,
    TimedRequest,
    TimedToken,
)
from benchmarks.suite.routers.workloads import WORKLOADS, arriving

SIZE = EngineSize(block_tokens=4, kv_tokens=64, step_tokens=16, max_sequences=4)
Asked = tuple[int, int]


def request(name: str, tokens: list[int], most: int = 4) -> TimedRequest:
    return TimedRequest(name, list(tokens), len(tokens), most)


def run(engine: TimedEngine) -> tuple[list[TimedToken], list[float]]:
    found: list[TimedToken] = []
    steps_s = []
    while took_s := engine.begin_step():
        steps_s.append(took_s)
        found += engine.end_step()
        assert len(steps_s) < 10_000
    return found, steps_s


def test_a_prompt_computes_only_what_is_not_cached() -> None:
    engine = TimedEngine(SIZE, EngineSpeed())
    tokens = list(range(30))
    engine.submit(request("a", tokens))
    first, first_s = run(engine)
    engine.submit(request("b", tokens))
    again, again_s = run(engine)
    assert [one.token for one in first] == [one.token for one in again]
    assert [one.cached for one in first] == [0] * 4 and [one.cached for one in again] == [28] * 4
    assert len(first_s) == len(again_s) + 1 and sum(again_s) < sum(first_s)
    assert (engine.queries, engine.hits) == (60, 28)
    assert engine.forget()
    engine.submit(request("c", tokens))
    assert run(engine)[0][0].cached == 0


def test_prompts_wait_in_their_order_and_slow_the_answers_beside_them() -> None:
    engine = TimedEngine(EngineSize(step_tokens=64), EngineSpeed(factor=2.0))
    engine.submit(request("a", [1], 60))
    alone_s = engine.begin_step()
    engine.end_step()
    engine.submit(request("b", list(range(200)), 1))
    beside_s = engine.begin_step()
    assert beside_s > alone_s + 2.0 * 60 * EngineSpeed().prompt_token_s


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), min_size=1, max_size=12),
    st.sets(st.integers(0, 11)),
)
def test_every_request_ends_and_gives_its_memory_back(
    asked: list[Asked], cancelled: set[int]
) -> None:
    engine = TimedEngine(SIZE, EngineSpeed())
    for number, (length, most) in enumerate(asked):
        tokens = [(number % 3) * 7 + place for place in range(length)]
        engine.submit(request(str(number), tokens, most))
    engine.begin_step()
    for number in cancelled:
        engine.cancel(str(number))
    found = engine.end_step()
    found += run(engine)[0]
    for number, (_, most) in enumerate(asked):
        if number not in cancelled:
            assert sum(one.name == str(number) for one in found) == most
    assert not engine.running and not engine.waiting and engine.forget()
    assert engine.num_free == SIZE.num_blocks and not engine.users


def test_what_can_never_be_served_is_refused() -> None:
    with pytest.raises(ValueError, match="more than the model's context"):
        TimedEngine(SIZE, EngineSpeed()).submit(request("a", list(range(64)), 1))


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=str)
def test_no_prompt_is_longer_than_is_said(workload: Any) -> None:
    sessions = arriving(workload, 5.0, 20.0, seed=3)
    assert sessions == arriving(workload, 5.0, 20.0, seed=3)
    assert [one.started_s for one in sessions] == sorted(one.started_s for one in sessions)
    for session in sessions:
        said = sum(len(turn.new_tokens) + turn.answer_tokens for turn in session.turns)
        assert said <= workload.longest_tokens


def row(router: str, load: float, number: int, effective: int) -> dict[str, Any]:
    spread = {"p50": 0.1, "p90": 0.2, "p99": 0.3}
    return {
        "workload": "agents",
        "router": router,
        "load": load,
        "round": number,
        "requests": 50,
        "effective": effective,
        "goodput_rps": effective / 10,
        "rejected": 5,
        "failed": 0,
        "engine_hit_ratio": 0.5,
        "cpu_ms_per_request": 2.0,
        "ttft_s": spread,
        "tbt_s": spread,
    }


def found() -> dict[str, Any]:
    rows = [row("round-robin", 1.0, n, 20 + n) for n in range(3)]
    rows += [row("moonpool", 1.0, n, 40) for n in range(3)]
    key = {"workload": "agents", "router": "vllm-kv-aware", "load": 1.0, "round": 0}
    rows.append(key | {"absent": "not given: --router-python | it"})
    fleet = {"speeds": [1.0, 2.0], "vllm_python": "", "kv_tokens": 1000, "step_tokens": 64}
    basis = {"slo": {"ttft_s": 1.0, "tbt_s": 0.1}, "requests_per_s": 5.0, "sessions_per_s": 0.5}
    origin = {"command": "moonpool bench  routers", "commit": "abc", "machine": "m"}
    return {"rows": rows, "bases": {"agents": basis}, "fleet": fleet, "origin": origin}


def test_rows_have_their_interval_and_reasons() -> None:
    shown = {line[1]: line for line in router_rows(found()["rows"])}
    assert shown[WORDS["round-robin"]][2] == "2.10 ± 0.25" and shown[WORDS["round-robin"]][9] == "-"
    assert shown[WORDS["moonpool"]][2] == "**4.00 ± 0.00**"
    assert shown[WORDS["vllm-kv-aware"]][2] == "does not run: not given: --router-python / it"
    assert len({len(line) for line in shown.values()}) == 1
    assert set(WORDS) == set(FRONT_NAMES)
    assert "how slow each is: 1, 2" in routers_section(found())


def test_programs_have_columns_of_their_own() -> None:
    given = found()
    reached: tuple[float | None, ...] = (3.0, None, 4.0)
    for number, p50_s in enumerate(reached):
        programs = {"begun": 5, "finished": 4, "calls": 50, "refusals": 2}
        given["rows"][number]["programs"] = programs | {"makespan_s": {"p50": p50_s, "p90": None}}
    shown = {line[1]: line for line in router_rows(given["rows"])}
    assert shown[WORDS["round-robin"]][10:] == ("4.0 s, never", "12 of 15", "6")
    # this row is kept from an earlier run, which lacks these columns
    assert shown[WORDS["moonpool"]][10:] == ("-", "-", "-")
    assert len({len(line) for line in shown.values()}) == 1
    assert "programs finished" in routers_section(given)
    assert "programs finished" not in routers_section(found())


def test_program_scheduling_gets_the_times_of_the_stubs() -> None:
    fleet = EngineFleet(speeds=(1.0, 3.0))
    settings, speed = program_settings(fleet), EngineSpeed(factor=2.0)
    assert settings["token_capacity_per_dp_rank"] == fleet.kv_tokens
    engine = TimedEngine(EngineSize(), speed)
    engine.submit(request("a", list(range(1024)), 8))
    _, steps_s = run(engine)
    model = settings["prefill_cost_model"]
    told_s = model["intercept_seconds"] + 1.024 * model["linear_seconds_per_1k_tokens"]
    assert sum(steps_s[:2]) == pytest.approx(told_s, rel=0.2)
    decode = settings["decode_throughput_model"]
    context_s = 1024 * decode["context_step_seconds_per_token"]
    told_s = decode["fixed_step_seconds"] + decode["batch_step_seconds_per_request"] + context_s
    assert steps_s[2] == pytest.approx(told_s, rel=0.01)
    assert set(program_settings(EngineFleet(vllm_python="python"))) == {
        "global_queue",
        "token_capacity_per_dp_rank",
    }


def test_a_stub_tells_what_is_held() -> None:
    engine = TimedEngine(SIZE, EngineSpeed())
    assert engine.usage == 0.0
    engine.submit(request("a", list(range(30))))
    engine.begin_step()
    assert engine.usage == 0.25  # 4 of 16 blocks are in use
    engine.end_step()
    run(engine)
    assert engine.usage == 0.0, "cached blocks that nobody holds are free"


def test_the_page_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, result = tmp_path / "page.md", tmp_path / "found.json"
    page.write_text(f"before\n{SECTION.begin}\n{SECTION.end}\nafter\n")
    monkeypatch.setattr(sys, "argv", ["page_routers"])
    assert page_routers.main(page, [result]) == 0 and "Not measured yet" in page.read_text()
    result.write_text(json.dumps(found()))
    monkeypatch.setattr(sys, "argv", ["page_routers", "--check"])
    assert page_routers.main(page, [result]) == 1
    monkeypatch.setattr(sys, "argv", ["page_routers"])
    assert page_routers.main(page, [result]) == 0 and "does not run" in page.read_text()
    monkeypatch.setattr(sys, "argv", ["page_routers", "--check"])
    assert page_routers.main(page, [result]) == 0
    monkeypatch.undo()
    monkeypatch.setattr(sys, "argv", ["page_routers", "--check"])
    assert page_routers.main() == 0  # checks the page of this repository


def test_runs_are_kept_and_go_on(tmp_path: Path) -> None:
    path, fleet = tmp_path / "runs.json", EngineFleet()
    runs = router_runs(path, fleet, {"command": "c"})
    runs.add(row("moonpool", 1.0, 0, 3))
    runs.add(row("moonpool", 1.0, 0, 4))  # again
    again = router_runs(path, fleet, {"command": "c"})
    assert [one["effective"] for one in again.rows] == [4]
    assert again.has(workload="agents", router="moonpool", round=0, load=1.0)
    assert not again.has(workload="agents", router="moonpool", round=1, load=1.0)
    with pytest.raises(BenchError, match="another fleet"):
        router_runs(path, EngineFleet(kv_tokens=64), {})
    path.write_text("{}")
    with pytest.raises(BenchError, match="no file of this benchmark"):
        router_runs(path, fleet, {})
