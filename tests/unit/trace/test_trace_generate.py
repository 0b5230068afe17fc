"""Tests that generated workloads are well-formed, reproducible, and similar to the trace to which
they are fitted."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from statistics import mean

import msgspec
import pytest
from sample_traces import AZURE, CONVERSATION, needs_azure, needs_conversation

from moonpool.trace.builtin import BUILT_IN
from moonpool.trace.builtin import CONVERSATION as LIKE_CONVERSATION
from moonpool.trace.fit import fit
from moonpool.trace.generate import generate
from moonpool.trace.jsonl import write_trace
from moonpool.trace.profile import (
    NUM_CLASSES,
    Branches,
    GeneratorProfile,
    SharedPrompts,
    ToolCalls,
    read_profile,
    write_profile,
)
from moonpool.trace.reader import open_trace
from moonpool.trace.row import TraceError, TraceRow
from moonpool.trace.statistics import TraceFigures, TraceStatistics, dispersion

CHATTY = GeneratorProfile(
    name="chatty",
    rate_rps=5.0,
    first_tokens=(700.0,),
    output_tokens=(100.0,),
    max_input_tokens=50_000,
    shared=SharedPrompts(share=0.5, count=4, skew=1.0, tokens=(1024.0,)),
    first_continue_share=(0.5,) * NUM_CLASSES,
    continue_share=(0.5,),
    gap_s=(30.0,),
    message_tokens=(60.0,),
)


def figures_of(rows: Iterable[TraceRow], block_tokens: int = 512) -> TraceFigures:
    character = TraceStatistics(block_tokens)
    for row in rows:
        character.add(row)
    return character.figures()


@pytest.mark.long
@pytest.mark.parametrize("name", BUILT_IN)
def test_every_built_in_workload_is_a_well_formed_trace(name: str) -> None:
    rows = list(generate(BUILT_IN[name], num_requests=500, seed=3))
    assert len(rows) == 500
    seen: dict[int, int] = {}
    lengths: dict[int, int] = {}
    expected_next = 0
    for row in rows:
        assert row.input_tokens > 0 and row.output_tokens > 0
        assert len(row.hash_ids) == -(-row.input_tokens // 512)
        assert round(row.arrived_s * 1000) / 1000 == row.arrived_s
        parent = -1
        for place, block in enumerate(row.hash_ids):
            assert seen.setdefault(block, parent) == parent  # equal ids mean equal prefixes
            parent = block
            if block == expected_next:
                expected_next += 1
            assert block < expected_next  # ids are numbered by their first appearance
            tokens = min(512, row.input_tokens - 512 * place)
            assert lengths.setdefault(block, tokens) == tokens
    assert all(a.arrived_s <= b.arrived_s for a, b in pairwise(rows))
    assert 0 <= rows[0].arrived_s < 60


def test_a_follow_up_contains_the_prompt_and_the_answer_before_it() -> None:
    lengths = {row.input_tokens for row in generate(CHATTY, num_requests=2_000)}
    assert min(lengths) == 700
    assert {(length - 700) % 160 for length in lengths} <= {0, 1024 % 160}


def test_a_cut_history_keeps_its_first_blocks_only() -> None:
    profile = msgspec.structs.replace(
        CHATTY,
        rate_rps=0.05,
        first_tokens=(8_192.0,),
        shared=None,
        continue_share=(0.0,),
        branches=Branches(class_share=(1.0,) * NUM_CLASSES, kept_share=(0.25,), new_share=(0.5,)),
    )
    rows = list(generate(profile, num_requests=400))
    firsts = {row.hash_ids[0]: row for row in rows if row.input_tokens == 8_192}
    cut = [row for row in rows if row.input_tokens == 4 * 512 + 6_144 // 2]
    assert len(firsts) + len(cut) >= 399 and len(cut) > 50
    for row in cut:
        before = firsts.get(row.hash_ids[0])
        if before is not None:
            assert row.hash_ids[:4] == before.hash_ids[:4]
            assert not set(row.hash_ids[4:]) & set(before.hash_ids)


def test_a_shared_prompt_longer_than_the_longest_prompt_is_cut() -> None:
    profile = msgspec.structs.replace(CHATTY, max_input_tokens=900)
    for row in generate(profile, num_requests=200):
        assert row.input_tokens <= 900
        assert len(row.hash_ids) == -(-row.input_tokens // 512)


def test_a_trace_that_cannot_be_finished_is_not_left_behind(tmp_path: Path) -> None:
    def broken() -> Iterator[TraceRow]:
        yield TraceRow(0.0, 1, 1)
        raise TraceError("no more")

    with pytest.raises(TraceError, match="no more"):
        write_trace(broken(), tmp_path / "a.jsonl")
    assert list(tmp_path.iterdir()) == []


def test_tool_calls_answer_briefly_and_go_on_soon() -> None:
    tools = ToolCalls(share=0.4, gap_s=(2.0,), output_tokens=(7.0,), result_tokens=(3_000.0,))
    profile = msgspec.structs.replace(
        CHATTY, tools=tools, shared=None, rate_rps=0.05, first_continue_share=(0.0,) * NUM_CLASSES
    )
    rows = list(generate(profile, num_requests=2_000))
    calls = [row for row in rows if row.output_tokens == 7]
    assert len(calls) / len(rows) == pytest.approx(0.4, abs=0.05)
    by_start = {round(row.arrived_s, 3): row for row in rows}
    followed = [by_start.get(round(row.arrived_s + 2.0, 3)) for row in calls[:-1]]
    grown = [b.input_tokens - a.input_tokens for a, b in zip(calls, followed, strict=False) if b]
    assert grown.count(3_007) > 0.95 * len(calls)


def test_a_limit_on_time_and_a_rate() -> None:
    rows = list(generate(CHATTY, duration_s=400, rate_rps=20.0, seed=1))
    assert rows[-1].arrived_s <= 400
    assert len(rows) / 400 == pytest.approx(20.0, rel=0.1)
    halves = [sum(low <= row.arrived_s < low + 200 for row in rows) for low in (0, 200)]
    assert halves[0] == pytest.approx(halves[1], rel=0.1)  # the rate does not rise at the start


@pytest.mark.long
def test_bursts_spread_counts_and_poisson_does_not() -> None:
    calm = msgspec.structs.replace(
        CHATTY, first_continue_share=(0.0,) * NUM_CLASSES, continue_share=(0.0,)
    )
    wild = msgspec.structs.replace(calm, burst_short_cv2=1.0, burst_long_cv2=0.3)
    calm_s = [row.arrived_s for row in generate(calm, duration_s=20_000)]
    wild_s = [row.arrived_s for row in generate(wild, duration_s=20_000)]
    assert dispersion(calm_s, 10) == pytest.approx(1.0, abs=0.15)
    assert dispersion(calm_s, 60) == pytest.approx(1.0, abs=0.25)
    # The count is 1 + 5/s * 10 s * (1.0 + 0.3 + 1.0 * 0.3), because each window has one rate.
    assert dispersion(wild_s, 10) == pytest.approx(81, rel=0.2)
    assert dispersion(wild_s, 300) == pytest.approx(1 + 5 * (10 * 1.3 + 300 * 0.3), rel=0.4)
    assert len(wild_s) / 20_000 == pytest.approx(5.0, rel=0.2)


DIGEST = """
import hashlib
from moonpool.trace.builtin import BUILT_IN
from moonpool.trace.generate import generate
digest = hashlib.sha256()
for name in ("conversation", "toolagent"):
    for row in generate(BUILT_IN[name], num_requests=3000, seed=5):
        digest.update(repr(row).encode())
print(digest.hexdigest())
"""


def test_the_same_seed_makes_the_same_rows_under_any_hash_seed() -> None:
    found = {
        subprocess.run(
            [sys.executable, "-c", DIGEST],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in ("0", "4711")
    }
    assert len(found) == 1


def test_another_seed_makes_other_rows() -> None:
    one, other = (
        hashlib.sha256(repr(list(generate(CHATTY, num_requests=50, seed=seed))).encode()).digest()
        for seed in (1, 2)
    )
    assert one != other


@pytest.mark.long
def test_memory_holds_live_sessions_only() -> None:
    peaks = []
    for num_requests in (3_000, 30_000):
        tracemalloc.start()
        assert sum(1 for _ in generate(CHATTY, num_requests=num_requests)) == num_requests
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


def test_a_written_trace_reads_back(tmp_path: Path) -> None:
    rows = list(generate(LIKE_CONVERSATION, num_requests=300, seed=9))
    path = tmp_path / "a.jsonl"
    assert write_trace(rows, path) == 300
    trace = open_trace(path)
    assert trace.info.tick_s == 0.0
    first_s = rows[0].arrived_s
    for row, back in zip(rows, trace, strict=True):
        assert back.arrived_s == pytest.approx(row.arrived_s - first_s)
        assert (back.input_tokens, back.output_tokens) == (row.input_tokens, row.output_tokens)
        assert back.hash_ids == row.hash_ids
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_profiles_are_files(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    for profile in (LIKE_CONVERSATION, BUILT_IN["toolagent"], BUILT_IN["l-eval"]):
        write_profile(profile, path)
        assert list(generate(read_profile(path), num_requests=20)) == list(
            generate(profile, num_requests=20)
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rate_rps": 0}, "rate_rps must be above 0"),
        ({"gap_s": [3, 2]}, "gap_s must be one value, or 31 rising values"),
        ({"repeat_share": 1.5}, "shares must be between 0 and 1"),
        ({"first_continue_share": [0.1]}, "first_continue_share must have"),
        ({"rate": 3}, "unknown field"),
        ({"a\nb": 3}, "unknown field `a b`"),
        ({"name": 3}, "Expected `str`"),
    ],
)
def test_wrong_profiles_get_one_line(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    fields = msgspec.to_builtins(CHATTY) | changes
    path = tmp_path / "p.json"
    path.write_bytes(msgspec.json.encode(fields))
    with pytest.raises(TraceError, match=words) as caught:
        read_profile(path)
    assert "p.json" in str(caught.value) and "\n" not in str(caught.value)


def test_sessions_that_never_end_and_no_limits_are_refused() -> None:
    endless = msgspec.structs.replace(CHATTY, continue_share=(1.0,))
    with pytest.raises(TraceError, match="never end"):
        generate(endless, num_requests=1)
    with pytest.raises(TraceError, match="number of requests or a duration"):
        generate(CHATTY)
    with pytest.raises(TraceError, match="too few to fit"):
        fit([TraceRow(0.0, 1, 1)], 512)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "num_requests", "input_tokens", "output_tokens", "hit_ratio"),
    [
        ("toolagent", 23_608, 8_596, 182, 0.59),
        ("synthetic", 3_993, 15_325, 149, 0.66),
        ("l-eval", 1_000, 19_019, 72, 0.82),
        ("simulated-32k", 600, 32_768, 512, 0.48),
    ],
)
def test_built_in_workloads_have_the_papers_means(
    name: str, num_requests: int, input_tokens: int, output_tokens: int, hit_ratio: float
) -> None:
    figures = figures_of(generate(BUILT_IN[name], num_requests=num_requests, seed=1))
    assert figures.blocks is not None
    assert figures.lengths.input_tokens.mean == pytest.approx(input_tokens, rel=0.06)
    assert figures.lengths.output_tokens.mean == pytest.approx(output_tokens, rel=0.06)
    assert figures.blocks.hit_ratio_tokens == pytest.approx(hit_ratio, abs=0.03)
    assert figures.arrivals.rate_rps == pytest.approx(BUILT_IN[name].rate_rps, rel=0.1)


def test_what_was_drawn_is_found_again_by_fitting() -> None:
    rows = list(generate(CHATTY, num_requests=6_000, seed=4))
    fitted = fit(rows, 512)
    assert fitted.shared is not None
    assert fitted.shared.count == 4
    assert fitted.shared.share == pytest.approx(0.5, abs=0.05)
    assert fitted.shared.skew == pytest.approx(1.0, abs=0.25)
    assert fitted.rate_rps == pytest.approx(5.0, rel=0.08)
    assert fitted.first_continue_share[1] == pytest.approx(0.5, abs=0.05)
    assert fitted.continue_share[0] == pytest.approx(0.5, abs=0.06)
    assert fitted.gap_s[15] == pytest.approx(30.0, abs=0.5)
    assert fitted.message_tokens == (60.0,)
    assert fitted.output_tokens == (100.0,)


@pytest.mark.long
@needs_conversation
def test_fitted_to_the_conversation_trace() -> None:
    trace = open_trace(CONVERSATION)
    rows = list(trace)
    real = figures_of(rows)
    profile = fit(rows, 512)
    drawn = [figures_of(generate(profile, duration_s=3_537, seed=seed)) for seed in range(3)]

    def of(read: object) -> float:
        assert callable(read)
        return mean(read(figures) for figures in drawn) / read(real)

    assert of(lambda f: f.arrivals.rate_rps) == pytest.approx(1, abs=0.06)
    assert of(lambda f: f.lengths.input_tokens.mean) == pytest.approx(1, abs=0.08)
    assert of(lambda f: f.lengths.input_tokens.p50) == pytest.approx(1, abs=0.08)
    assert of(lambda f: f.lengths.input_tokens.p90) == pytest.approx(1, abs=0.10)
    assert of(lambda f: f.lengths.input_tokens.p99) == pytest.approx(1, abs=0.12)
    for quantile in ("mean", "p50", "p90"):
        read = lambda f, q=quantile: getattr(f.lengths.output_tokens, q)  # noqa: E731
        assert of(read) == pytest.approx(1, abs=0.03)
    assert of(lambda f: f.lengths.output_tokens.p99) == pytest.approx(1, abs=0.08)
    assert of(lambda f: f.turns.share) == pytest.approx(1, abs=0.06)
    assert of(lambda f: f.turns.gap_s.p50) == pytest.approx(1, abs=0.10)
    assert of(lambda f: f.blocks.hit_ratio_blocks) == pytest.approx(1, abs=0.08)
    for capacity in (10_000, 30_000, 50_000, 100_000):
        hits = mean(f.blocks.lru_hit_ratio[capacity] for f in drawn if f.blocks)
        assert real.blocks is not None
        assert hits == pytest.approx(real.blocks.lru_hit_ratio[capacity], abs=0.035)
    long_s = [row.arrived_s for row in generate(profile, duration_s=15_000, seed=1)]
    for window_s in (10, 60, 300):
        ratio = (dispersion(long_s, window_s) or 0) / real.arrivals.dispersion[window_s]
        assert 0.6 < ratio < 1.5


@needs_azure
def test_fitted_to_a_trace_without_hashes() -> None:
    rows = list(open_trace(AZURE))
    real = figures_of(rows, 0)
    profile = fit(rows, 0)
    drawn = [figures_of(generate(profile, duration_s=7_000, seed=seed), 0) for seed in range(3)]
    assert all(figures.blocks is None for figures in drawn)
    assert mean(f.arrivals.rate_rps for f in drawn) == pytest.approx(5.53, rel=0.15)
    assert mean(f.lengths.input_tokens.mean for f in drawn) == pytest.approx(1_155, rel=0.04)
    assert mean(f.lengths.output_tokens.mean for f in drawn) == pytest.approx(211, rel=0.03)
    for window_s in (10, 300):
        found = mean(f.arrivals.dispersion[window_s] for f in drawn)
        assert 0.6 < found / real.arrivals.dispersion[window_s] < 1.7
