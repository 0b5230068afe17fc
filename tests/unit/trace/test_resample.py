"""Tests draws of a trace: they keep bursts and the sharing of prefixes, and differ from each
other."""

from __future__ import annotations

from collections import Counter
from statistics import mean, pvariance

import msgspec
import pytest

from moonpool.sim.capacity import PromptCache, prompts_of
from moonpool.trace.builtin import BUILT_IN
from moonpool.trace.generate import generate
from moonpool.trace.resample import resample
from moonpool.trace.row import TraceRow
from moonpool.trace.transform import common_blocks

SEEDS = range(1, 6)


@pytest.fixture(scope="module")
def rows() -> list[TraceRow]:
    return list(generate(BUILT_IN["conversation"], num_requests=2000, seed=5))


def hit_share(rows: list[TraceRow]) -> float:
    cache = PromptCache("lru", None, 512)
    for prompt in prompts_of(rows, 512, 512):
        cache.serve(prompt)
    return cache.ratios().by_token


def test_seed_0_is_the_trace(rows: list[TraceRow]) -> None:
    assert resample(rows, 0) == rows


def test_a_seed_gives_one_trace_and_another_seed_another(rows: list[TraceRow]) -> None:
    assert resample(rows, 1) == resample(rows, 1)
    assert resample(rows, 1) != resample(rows, 2)


def test_load_and_order_stay(rows: list[TraceRow]) -> None:
    tokens = sum(row.input_tokens for row in rows)
    for seed in SEEDS:
        drawn = resample(rows, seed)
        assert len(drawn) == pytest.approx(len(rows), rel=0.15)
        assert sum(row.input_tokens for row in drawn) == pytest.approx(tokens, rel=0.2)
        times = [row.arrived_s for row in drawn]
        assert times == sorted(times) and times[0] >= 0
        assert times[-1] <= rows[-1].arrived_s + 1e-6


def test_prefixes_are_shared_as_much_as_in_the_trace(rows: list[TraceRow]) -> None:
    shares = [hit_share(resample(rows, seed)) for seed in SEEDS]
    assert mean(shares) == pytest.approx(hit_share(rows), rel=0.12)


def test_equal_names_are_equal_prefixes(rows: list[TraceRow]) -> None:
    before: dict[int, int] = {}
    for row in resample(rows, 3):
        assert len(set(row.hash_ids)) == len(row.hash_ids)
        for parent, block in zip((-1, *row.hash_ids), row.hash_ids, strict=False):
            assert before.setdefault(block, parent) == parent


@pytest.mark.long
def test_bursts_stay() -> None:
    """For a trace with strong bursts, the variance of arrivals in ten seconds over their mean must
    stay about the same in draws."""
    bursty = msgspec.structs.replace(BUILT_IN["conversation"], burst_short_cv2=4.0)
    rows = list(generate(bursty, num_requests=2000, seed=2))

    def dispersion(rows: list[TraceRow]) -> float:
        counts = Counter(int(row.arrived_s // 10) for row in rows)
        values = [counts[i] for i in range(int(rows[-1].arrived_s // 10))]
        return pvariance(values) / mean(values)

    assert dispersion(rows) > 20
    drawn = mean(dispersion(resample(rows, seed)) for seed in range(1, 21))
    assert drawn > 0.5 * dispersion(rows)


def test_copies_share_common_blocks_only() -> None:
    """In the trace, all prompts share block 0, and each turn continues half a minute later."""
    rows = []
    for i in range(200):
        rows.append(TraceRow(60.0 * i, 1024, 1, (0, 2 * i + 1)))
        rows.append(TraceRow(60.0 * i + 30.0, 1536, 1, (0, 2 * i + 1, 2 * i + 2)))
    assert common_blocks(rows) == {0}
    for seed in SEEDS:
        drawn = resample(rows, seed)
        assert len({row.hash_ids for row in drawn}) == len(drawn)
        assert {row.hash_ids[0] for row in drawn} == {0}
        firsts = {row.hash_ids for row in drawn if row.input_tokens == 1024}
        continued = Counter(r.hash_ids[:2] for r in drawn if r.input_tokens == 1536)
        assert max(continued.values()) <= 2 and mean(continued.values()) < 1.1
        assert sum(name in firsts for name in continued) >= 0.95 * len(continued)


def test_without_hashes_rows_keep_their_lengths() -> None:
    rows = [TraceRow(float(i), 10 + i, 1, (), "a") for i in range(100)]
    drawn = resample(rows, 1)
    assert {row.input_tokens for row in drawn} <= {row.input_tokens for row in rows}
    assert len({row.session for row in drawn}) > 1 and all(not row.hash_ids for row in drawn)
    assert resample(rows[:1], 1) == rows[:1]
