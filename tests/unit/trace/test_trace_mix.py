"""Tests workloads that are mixed over a day: rates by the hour, in a trace like any other."""

from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.trace.builtin import SHIFTING_DAY
from moonpool.trace.generate import generate_mix
from moonpool.trace.reader import open_trace
from moonpool.trace.row import TraceError, TraceRow
from tests.cli_runner import invoke, succeed


def rows(**limits: float) -> list[TraceRow]:
    return list(generate_mix(SHIFTING_DAY, **limits))  # type: ignore[arg-type]


def test_documents_come_in_the_morning_and_chats_in_the_evening() -> None:
    day_s = SHIFTING_DAY.day_s
    day = rows(duration_s=day_s)
    assert [row.arrived_s for row in day] == sorted(row.arrived_s for row in day)
    assert day[-1].arrived_s <= day_s
    assert len(day) == pytest.approx(SHIFTING_DAY.rate_rps * day_s, rel=0.1)
    ratios = []
    for begin, end in ((9, 12), (19, 22)):
        part = [row for row in day if begin <= 24 * row.arrived_s / day_s < end]
        ratios.append(sum(r.input_tokens for r in part) / sum(r.output_tokens for r in part))
    assert ratios[0] > 4 * ratios[1]


def test_ids_of_different_kinds_are_never_equal() -> None:
    day = rows(num_requests=2000)
    num_kinds = len(SHIFTING_DAY.kinds)
    for row in day:
        assert len({one % num_kinds for one in row.hash_ids}) <= 1


def test_a_day_is_repeatable_and_the_next_is_like_it() -> None:
    assert rows(num_requests=500) == rows(num_requests=500)
    assert rows(num_requests=500) != rows(num_requests=500, seed=1)
    two = rows(duration_s=2 * SHIFTING_DAY.day_s)
    first = sum(row.arrived_s <= SHIFTING_DAY.day_s for row in two)
    assert first == pytest.approx(len(two) / 2, rel=0.05)


def test_the_rate_can_be_chosen_and_must_be_one() -> None:
    slow = rows(duration_s=SHIFTING_DAY.day_s, rate_rps=0.5)
    assert len(slow) == pytest.approx(0.5 * SHIFTING_DAY.day_s, rel=0.1)
    with pytest.raises(TraceError, match="not a positive number"):
        rows(duration_s=10.0, rate_rps=-1.0)
    with pytest.raises(TraceError, match="number of requests or a duration"):
        rows()


def test_the_command_writes_it(tmp_path: Path) -> None:
    path = tmp_path / "day.jsonl"
    arguments = ["trace", "generate", "--profile", "shifting-day", "--requests", "200"]
    succeed(*arguments, "-o", path)
    assert len(list(open_trace(str(path)))) == 200
    refused = invoke(*arguments, "-o", path, "--write-profile", tmp_path / "p")
    assert refused.exit_code == 1
