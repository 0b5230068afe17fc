"""Tests programs in a closed loop: calls follow each other, and refused calls are sent again."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from moonpool.config.parse import parse_config
from moonpool.cost.fitted import FittedCost
from moonpool.request_record import RequestRecord
from moonpool.sim.hardware.build import build_hardware
from moonpool.sim.outcome import summarise
from moonpool.sim.programs import ProgramFigures
from moonpool.sim.settings import SimulationSettings
from moonpool.sim.simulation import Simulation
from moonpool.sim.workload import make_arrivals
from moonpool.trace.row import TraceRow

BLOCK = 64
COST = FittedCost(
    prefill=(0.004, 0.0002, 1e-9, 2e-9),
    decode=(0.004, 0.0005, 2e-7),
    token_bytes=1024,
    control_latency_s=0.0005,
)


def program(name: int, num_calls: int, pause_s: float, at_s: float = 0.0) -> list[TraceRow]:
    """Makes a program whose prompts each have two blocks more than the prompt before."""
    rows, call = [], ""
    for number in range(num_calls):
        before, call = call, f"{name}#{number}"
        ids = tuple(range(name * 1000, name * 1000 + 4 + 2 * number))
        after = (before,) if before else ()
        shape = len(ids) * BLOCK, 10, ids, f"p{name}"
        rows.append(TraceRow(at_s, *shape, call=call, after=after, delay_s=pause_s * bool(after)))
    return rows


def run(
    rows: list[TraceRow], most_programs: int | None = None, **tables: Any
) -> tuple[dict[str, Any], list[RequestRecord]]:
    cluster = {"prefill": 0, "decode": 0, "mixed": 1}
    pool = {"block_tokens": BLOCK, "dram_tokens_per_instance": 8192}
    defaults: dict[str, Any] = {"cluster": cluster, "pool": pool}
    config = parse_config("", {**defaults, **tables}, {})
    records: list[RequestRecord] = []
    simulation = Simulation(
        config, build_hardware(config, COST), SimulationSettings(most_programs=most_programs)
    )
    simulation.run(make_arrivals(rows, BLOCK, BLOCK, 8192), records.append)
    simulation.conductor.validate()
    return summarise(simulation, 0.0), records


def test_a_program_whose_first_call_is_hopeless_fails_once() -> None:
    figures, records = run(program(1, 3, 1.0), slo={"ttft_s": 1e-6})
    found = figures["programs"]
    assert (found["count"], found["failed"], found["unfinished"]) == (1, 1, 0)
    assert len(records) == 1


def test_agents_that_are_read_before_their_parents_are_one_program() -> None:
    figures = ProgramFigures(BLOCK)
    for session, parent in (("inner", "child"), ("child", "root"), ("root", "")):
        row = TraceRow(0.0, 9, 9, session=session, call=session, parent=parent)
        figures.read(row, 0.0)
    assert figures.num_under_way == 1


def test_a_call_starts_when_its_tool_has_run() -> None:
    figures, records = run([*program(1, 4, 2.0), *program(2, 2, 5.0)])
    own = [r for r in records if r.program == "p1"]
    for before, record in pairwise(own):
        assert before.finished_s is not None
        assert record.arrived_s == pytest.approx(before.finished_s + 2.0, abs=0.01)
    found = figures["programs"]
    assert (found["count"], found["calls"], found["failed"]) == (2, 6, 0)
    assert found["recomputed_tokens"] == 0
    assert found["makespan_s"]["p50"] > 5.0 and found["makespan_s"]["p90"] > 6.0


def test_a_refused_call_is_tried_again_as_clients_do() -> None:
    rows = [row for name in range(1, 13) for row in program(name, 2, 0.1)]
    slo = {"ttft_s": 0.3, "tbt_s": 0.5}
    figures, records = run(rows, slo=slo, conductor={"programs": "off"})
    found = figures["programs"]
    assert found["count"] == 12 and found["unfinished"] == 0
    assert found["retries"] > 0
    assert figures["requests"] == len(records) <= 24, "a call that is tried again is one request"


def test_so_many_programs_run_at_a_time() -> None:
    rows = [row for name in range(1, 5) for row in program(name, 2, 1.0)]
    figures, records = run(rows, most_programs=1)
    assert figures["programs"]["count"] == 4
    spans = {
        name: (
            min(r.arrived_s for r in records if r.program == name),
            max(r.finished_s or 0.0 for r in records if r.program == name),
        )
        for name in {r.program for r in records}
    }
    ordered = sorted(spans.values())
    assert all(end <= begin for (_, end), (begin, _) in pairwise(ordered))


def test_tools_run_before_a_call_that_is_read_late() -> None:
    """Sessions without times may lie between each other in a file."""
    mixed = [
        row for pair in zip(program(1, 2, 30.0), program(2, 2, 30.0), strict=True) for row in pair
    ]
    _, records = run(mixed, most_programs=1)
    for name in ("p1", "p2"):
        first, second = sorted(r.arrived_s for r in records if r.program == name)
        assert second >= first + 30.0


def test_whole_programs_wait_where_all_together_would_compute_twice() -> None:
    rows = [row for name in range(1, 25) for row in program(name, 12, 0.3, at_s=0.8 * name)]
    pool = {"block_tokens": BLOCK, "dram_tokens_per_instance": 4096}
    twice = {}
    for rules in ("off", "named"):
        figures, _ = run(rows, conductor={"programs": rules}, pool=pool)
        assert figures["programs"]["count"] == 24 and not figures["programs"]["failed"]
        twice[rules] = figures["programs"]["recomputed_tokens"]
    assert twice["named"] < twice["off"] / 2


@pytest.mark.long
def test_a_tool_may_run_for_days() -> None:
    rows = program(1, 2, 10_000_000.0)
    figures, records = run([*rows, *program(2, 3, 900.5)])
    assert figures["programs"]["count"] == 2 and len(records) == 5
    assert figures["programs"]["makespan_s"]["p90"] == pytest.approx(1e7, rel=1e-3)
    assert all(record.ttft_s is not None and record.ttft_s < 1.0 for record in records)
    assert figures["events"] < 20_000
