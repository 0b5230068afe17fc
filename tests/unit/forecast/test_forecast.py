"""Forecasts a server of known times in virtual time, so that no result depends on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from timed_server import TimedServer
from virtual_loop import VirtualLoop

from moonpool.cost.fitted import FittedCost
from moonpool.cost.recorded import CostEstimatorRecord, InstanceRecord
from moonpool.http_client import client as http_client
from moonpool.studies.trace_rows import TraceRows
from moonpool.trace.row import TraceRow
from moonpool.types import InstanceId, Role
from moonpool_lab.forecast import front_door, measured_server
from moonpool_lab.forecast.forecast_table import TableError, add_entry, read_table
from moonpool_lab.forecast.front_door import TimedAnswer
from moonpool_lab.forecast.measured_server import contention_of
from moonpool_lab.forecast.run import ForecastPlan, run_forecast
from moonpool_lab.replay import player
from moonpool_lab.replay import run as replay_run
from moonpool_lab.replay.server import ServerFacts, ServerUnfitError


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> Iterator[VirtualLoop]:
    found = VirtualLoop()
    asyncio.set_event_loop(found)
    for module in (front_door, measured_server, http_client, player):
        monkeypatch.setattr(module, "monotonic", found.time)
    monkeypatch.setattr(replay_run.time, "perf_counter", found.time)
    yield found
    asyncio.set_event_loop(None)
    found.close()


def sessions(count: int = 120, seed: int = 5) -> TraceRows:
    """Makes requests of one to six turns, with prompts of up to 2,000 tokens, one every 4 s."""
    rng = Random(seed)
    rows, names, open_sessions, at_s = [], iter(range(10**6)), [], 0.0
    for _ in range(count):
        at_s += rng.expovariate(0.25)
        if open_sessions and rng.random() < 0.5:
            blocks, tokens = open_sessions.pop(rng.randrange(len(open_sessions)))
        else:
            blocks, tokens = [], 0
        tokens += rng.randrange(50, 500)
        blocks = [*blocks[: tokens // 16], *(next(names) for _ in range(-(-tokens // 16)))]
        blocks = blocks[: -(-tokens // 16)]
        answer = rng.randrange(8, 60)
        rows.append(TraceRow(at_s, tokens, answer, tuple(blocks)))
        if tokens < 1500:
            open_sessions.append((blocks[: tokens // 16], tokens))
    return TraceRows(rows, 16, "sessions")


def forecast(
    loop: VirtualLoop, server: TimedServer, table: Path, told: list[str] | None = None, **plan: Any
) -> dict[str, Any]:
    told = [] if told is None else told

    async def main() -> dict[str, Any]:
        async with server.serving():
            given = {"measure_s": 60.0, "run_s": 20.0, "trace": sessions()} | plan
            return await run_forecast(
                ForecastPlan(url=server.url, table=table, **given), told.append
            )

    return loop.run_until_complete(main())


def worst(found: dict[str, Any], *names: str) -> float:
    return max(abs(outcome["errors"][n]) for outcome in found["outcomes"] for n in names)


GIVEN: dict[str, Any] = {"slo_ttft_s": 3.0, "slo_tbt_s": 0.2}


@pytest.mark.long
@pytest.mark.parametrize(
    "slo", [{}, pytest.param(GIVEN, marks=pytest.mark.long)], ids=["usual", "given"]
)
def test_what_is_forecast_comes(loop: VirtualLoop, tmp_path: Path, slo: dict[str, Any]) -> None:
    """The forecast must learn chunks, batches, cache and queue of a server without a
    description."""
    given = slo | {"loads": (0.5, 0.8, 1.5)}
    found = forecast(loop, TimedServer(), tmp_path / "table.jsonl", **given)
    measured = found["forecast"]["measured"]
    assert measured["chunk_tokens"] == 512 and measured["full"]
    assert measured["cache_tokens"] == pytest.approx(65_536, rel=0.05)
    errors = [abs(e) for outcome in found["outcomes"] for e in outcome["errors"].values()]
    assert sorted(errors)[len(errors) // 2] < 0.03, found["outcomes"]
    assert worst(found, "ttft_s.p50", "tbt_s.p50", "tbt_s.p90", "tbt_s.p99") < 0.1
    assert worst(found, "hit_ratio") < 0.03
    assert worst(found, "effective_share") < 0.1


@pytest.mark.long
def test_a_server_with_few_sequences_queues(loop: VirtualLoop, tmp_path: Path) -> None:
    given = GIVEN | {"loads": (0.5, 1.0)}
    found = forecast(loop, TimedServer(sequences=4), tmp_path / "table.jsonl", **given)
    assert found["forecast"]["measured"]["max_sequences"] == 4
    assert worst(found, "ttft_s.p50", "tbt_s.p50") < 0.15, found["outcomes"]


@pytest.mark.long
def test_a_server_without_a_cache_is_seen_as_one(loop: VirtualLoop, tmp_path: Path) -> None:
    given = {"loads": (0.5,), "run_s": 20.0}
    found = forecast(loop, TimedServer(cache_blocks=0), tmp_path / "table.jsonl", **given)
    assert not found["forecast"]["measured"]["has_cache"]
    assert found["forecast"]["loads"][0]["figures"]["hit_ratio"] == 0.0
    assert worst(found, "ttft_s.p50", "tbt_s.p50") < 0.1, found["outcomes"]


@pytest.mark.long
def test_a_server_whose_speed_changes_is_measured_again(loop: VirtualLoop, tmp_path: Path) -> None:
    """The forecast must be right although the server's machine had other work during the first
    prompts."""
    server = TimedServer(prompt_token_s=400e-6)
    server.on_request = lambda: setattr(
        server, "prompt_token_s", 400e-6 if server.num_requests < 12 else 100e-6
    )
    found = forecast(loop, server, tmp_path / "table.jsonl", loads=(0.5,), measure_s=20.0)
    assert 0.8 < found["forecast"]["measured"]["drift"] < 1.25
    assert worst(found, "ttft_s.p50", "tbt_s.p50") < 0.1, found["outcomes"]


@pytest.mark.long
def test_a_load_is_that_share_of_the_capacity(loop: VirtualLoop, tmp_path: Path) -> None:
    """A trace that begins with few requests must be replayed at the rate of the forecast."""
    rows = sessions(400).rows
    thin = [msgspec.structs.replace(row, arrived_s=0.2 * row.arrived_s) for row in rows[40:]]
    late_s = rows[40].arrived_s - thin[0].arrived_s
    thin = [msgspec.structs.replace(row, arrived_s=row.arrived_s + late_s) for row in thin]
    trace = TraceRows([*rows[:40], *thin], 16, "thin")
    given = GIVEN | {"trace": trace, "run_s": 10.0, "loads": (0.5, 1.0)}
    found = forecast(loop, TimedServer(), tmp_path / "table.jsonl", **given)
    capacity_rps = found["forecast"]["capacity_rps"]
    half, full = found["forecast"]["loads"]
    for load in (half, full):
        assert load["rows"] == round(load["load"] * capacity_rps * 10.0) > 40
        gone_s = trace.rows[load["rows"]].arrived_s / load["speed"]
        assert gone_s == pytest.approx(10.0, rel=0.02)
    assert full["figures"]["effective_share"] >= 0.9
    assert worst(found, "effective_share") < 0.1, found["outcomes"]
    at_half = found["outcomes"][0]["errors"]
    assert max(abs(at_half["ttft_s.p50"]), abs(at_half["tbt_s.p50"])) < 0.1, at_half


@pytest.mark.long
def test_steps_that_differ_are_forecast_as_such(loop: VirtualLoop, tmp_path: Path) -> None:
    server = TimedServer(ratios=(0.7, 0.9, 1.0, 1.0, 1.1, 1.3))
    given = GIVEN | {"loads": (0.4,), "run_s": 20.0, "trace": sessions(400)}
    found = forecast(loop, server, tmp_path / "table.jsonl", **given)
    errors = found["outcomes"][0]["errors"]
    names = ("ttft_s.p50", "tbt_s.p50", "tbt_s.p90", "tbt_s.p99")
    assert max(abs(errors[name]) for name in names) < 0.15, errors


@pytest.mark.long
def test_a_moonpool_server_decides_by_the_costs_that_it_states(
    loop: VirtualLoop, tmp_path: Path
) -> None:
    """The server believes that prompts are ten times as slow as they are, and therefore computes
    short chunks, which the forecast must expect."""
    tables = {
        "cluster": {"prefill": 0, "decode": 0, "mixed": 1},
        "conductor": {"admission": "none", "learning": False},
        "engine": {"chunk_tokens": 512, "max_sequences": 64},
        "pool": {"block_tokens": 16, "eviction": "lru", "dram_tokens_per_instance": 0},
        "slo": {"ttft_s": 3.0, "tbt_s": 0.1},
    }
    believed = FittedCost(prefill=(0.0, 1e-3, 0.0, 0.0), decode=(0.004, 0.0, 0.0), mixed=(0.0, 0.0))
    stated = InstanceRecord(InstanceId("mixed-0"), Role.MIXED, believed)
    pages = {
        "/server_info": {"config": tables, "model": {"vocab_size": 1000}},
        "/beliefs": msgspec.to_builtins(CostEstimatorRecord((stated,))),
    }
    errors = []
    for known in (pages, {"/server_info": pages["/server_info"]}):
        # 85 believed ms are within .85 of the SLO. The server does not share a step's tokens among
        # several prompts like moonpool, so only times between tokens are compared.
        server = TimedServer(chunk_tokens=85, pages=known)
        told: list[str] = []
        found = forecast(loop, server, tmp_path / f"{len(known)}.jsonl", told, loads=(0.5,))
        assert any("by which costs it decides" in line for line in told) is (len(known) == 1)
        pool = found["forecast"]["simulated"]["pool"]
        assert pool["dram_tokens_per_instance"] == pytest.approx(65_536, rel=0.05)
        errors.append(found["outcomes"][0]["errors"])
    stated_too, alone = errors
    assert abs(stated_too["tbt_s.p50"]) < 0.1, errors
    assert abs(stated_too["tbt_s.p99"]) < 0.4 < 1.0 < alone["tbt_s.p99"], errors


@pytest.mark.long
def test_the_forecast_is_written_before_anything_is_tried(
    loop: VirtualLoop, tmp_path: Path
) -> None:
    """The server looks into the table when a request of a load arrives: the forecast must be
    there."""
    table, server = tmp_path / "table.jsonl", TimedServer()
    seen: list[int] = []
    server.on_request = lambda: seen.append(len(read_table(table)) if table.exists() else 0)
    found = forecast(loop, server, table, loads=(0.5, 1.0), run_s=10.0, measure_s=20.0)
    replayed = sum(one["rows"] for one in found["forecast"]["loads"])
    assert seen[-replayed:] == sorted(seen[-replayed:]) and min(seen[-replayed:]) == 1
    assert max(seen[:-replayed]) == 0, "measured before the forecast"
    entries = read_table(table)
    assert [entry["kind"] for entry in entries] == ["forecast", "outcome", "outcome"]
    assert entries[0]["hash"] == entries[1]["forecast"] == entries[2]["forecast"]


@pytest.mark.parametrize(
    "meddle",
    [
        lambda lines: [lines[0].replace(b"0.5", b"0.6"), *lines[1:]],
        lambda lines: [lines[0], *lines[2:]],
        lambda lines: [lines[1], lines[0], *lines[2:]],
        lambda lines: [*lines[:2], lines[1], *lines[2:]],
        lambda lines: [*lines, b"{}"],
        lambda lines: [*lines, b"[]"],
        lambda lines: [*lines, b"not json"],
    ],
    ids=["changed", "left out", "swapped", "doubled", "no hash", "no entry", "no json"],
)
def test_a_changed_table_is_neither_read_nor_added_to(tmp_path: Path, meddle: Any) -> None:
    path = tmp_path / "table.jsonl"
    for number in range(3):
        add_entry(path, {"kind": "forecast", "number": number, "ttft_s": 0.5})
    assert [entry["number"] for entry in read_table(path)] == [0, 1, 2]
    path.write_bytes(b"\n".join(meddle(path.read_bytes().splitlines())) + b"\n")
    before = path.read_bytes()
    with pytest.raises(TableError, match=r"line \d of table.jsonl is not what was once written"):
        read_table(path)
    with pytest.raises(TableError):
        add_entry(path, {"kind": "forecast"})
    assert path.read_bytes() == before


def test_separate_instances_of_a_machine_slow_each_other_down() -> None:
    """The prompt takes 3 s in place of 2, and the answer's tokens come half as fast meanwhile."""
    gaps_s = [0.1] * 20 + [0.2] * 14 + [0.1] * 10
    answer = TimedAnswer(0.0, tuple(accumulate(gaps_s)), None)
    prompt = TimedAnswer(2.0, (5.05,), None)
    found = contention_of([(prompt, answer)], alone_s=2.0, front_s=0.05)
    assert found == pytest.approx((1.5, 2.0))
    still = TimedAnswer(0.0, tuple(accumulate([0.1] * 60)), None)
    alone = TimedAnswer(2.0, (4.0,), None)
    assert contention_of([(alone, still)], alone_s=2.0, front_s=0.05) == (1.0, pytest.approx(1.0))


def test_a_refused_prompt_is_sent_again(loop: VirtualLoop, tmp_path: Path) -> None:
    """The server refuses every seventh prompt, in all parts of the measurement."""
    server = TimedServer()
    server.refuses = lambda number: number % 7 == 0
    told: list[str] = []

    async def main() -> measured_server.MeasuredServer:
        async with server.serving():
            client = http_client.HttpClient(server.url)
            facts = ServerFacts(model="known", vocab_size=300, max_model_tokens=8192, config=None)
            door = front_door.FrontDoor(client, facts, 300, as_text=False)
            lengths = measured_server.TraceLengths((100, 600, 1500), (120, 620, 1520))
            try:
                return await measured_server.measure_server(door, lengths, 40.0, told.append)
            finally:
                client.close()

    found = loop.run_until_complete(main())
    assert server.num_requests > 50 and not told
    assert found.cost.prefill_s(1500, 0) == pytest.approx(3 * 0.004 + 1500 * 100e-6, rel=0.1)
    assert found.chunk_tokens == 512


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_a_server_that_ends_answers_early_is_told_in_one_line(
    loop: VirtualLoop, tmp_path: Path, num_tokens: int
) -> None:
    server = TimedServer()
    server.longest_answer = num_tokens
    with pytest.raises(ServerUnfitError, match=r"no answer lasted long enough .* ignore_eos"):
        forecast(loop, server, tmp_path / "table.jsonl")


def test_a_server_that_refuses_all_is_told_in_one_line(loop: VirtualLoop, tmp_path: Path) -> None:
    server = TimedServer()
    server.refuses = lambda number: number > 30
    with pytest.raises(ServerUnfitError, match=r"a prompt of \d+ tokens failed: no room"):
        forecast(loop, server, tmp_path / "table.jsonl")
