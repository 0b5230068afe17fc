"""Tests the figures of a request that are derived from its record."""

from __future__ import annotations

import pytest

from moonpool.request_record import STAGES, RequestRecord
from moonpool.types import RequestId, Slo


def record(ttft_s: float = 1.0, tbt_s: float = 0.1) -> RequestRecord:
    slo = Slo(ttft_s=ttft_s, tbt_s=tbt_s)
    return RequestRecord(RequestId("r"), num_prompt_tokens=8, slo=slo, arrived_s=10.0)


def test_nothing_has_happened_yet() -> None:
    fresh = record()
    assert (fresh.ttft_s, fresh.tpot_s, fresh.tbt_top10_mean_s) == (None, None, None)
    assert not fresh.effective and fresh.stages_s() == {}


def test_one_token() -> None:
    one = record()
    one.note_tokens(1, 10.5)
    assert one.ttft_s == 0.5 and one.num_generated_tokens == 1
    assert one.tpot_s is None and one.gaps_s == []


def test_gaps() -> None:
    several = record()
    for instant in (10.5, 10.6, 10.9):
        several.note_tokens(1, instant)
    assert several.gaps_s == pytest.approx([0.1, 0.3])
    assert several.tpot_s == pytest.approx(0.2)


@pytest.mark.parametrize("counts", [(3,), (3, 2), (1, 4), (2, 2, 1)])
def test_several_tokens_at_once(counts: tuple[int, ...]) -> None:
    """n tokens have n - 1 gaps, whose sum is the time from the first to the last token, however
    many tokens came together."""
    burst = record()
    for number, count in enumerate(counts):
        burst.note_tokens(count, 10.5 + number)
    assert burst.num_generated_tokens == sum(counts)
    assert len(burst.gaps_s) == sum(counts) - 1
    assert sum(burst.gaps_s) == pytest.approx(len(counts) - 1)
    assert burst.tpot_s == pytest.approx((len(counts) - 1) / (sum(counts) - 1))


def test_no_tokens_at_all_change_nothing() -> None:
    empty = record()
    empty.note_tokens(0, 10.5)
    assert empty.ttft_s is None and empty.gaps_s == []


def test_tbt_is_the_mean_of_the_longest_tenth() -> None:
    long = record()
    long.gap_runs = [(float(n), 1) for n in range(1, 31)]
    assert long.tbt_top10_mean_s == pytest.approx((28 + 29 + 30) / 3)
    long.gap_runs = [(0.5, 1), (2.0, 1)]
    assert long.tbt_top10_mean_s == 2.0


@pytest.mark.parametrize(
    ("outcome", "ttft_s", "gap_s", "effective"),
    [
        ("stop", 0.9, 0.05, True),
        ("length", 1.0, 0.1, True),
        ("length", 1.1, 0.05, False),
        ("stop", 0.5, 0.2, False),
        ("abort", 0.5, 0.05, False),
        ("deadline", 0.5, 0.05, False),
        ("", 0.5, 0.05, False),
    ],
)
def test_effective_means_both_slos(
    outcome: str, ttft_s: float, gap_s: float, effective: bool
) -> None:
    done = record()
    done.note_tokens(1, 10.0 + ttft_s)
    done.gap_runs = [(gap_s, 1)]
    done.outcome = outcome
    assert done.effective is effective


def test_an_answer_of_one_token_can_be_effective() -> None:
    done = record()
    done.note_tokens(1, 10.5)
    done.outcome = "length"
    assert done.effective


def test_stages_sum_to_the_whole_time() -> None:
    done = record()
    done.placed_s, done.prefill_started_s, done.prefill_done_s = 10.1, 10.3, 10.7
    done.first_token_s, done.finished_s = 10.8, 12.0
    stages = done.stages_s()
    assert set(stages) == {name for name, _, _ in STAGES}
    assert sum(stages.values()) == pytest.approx(2.0)
    assert stages["prefill"] == pytest.approx(0.4)


def test_clocks_that_disagree_give_no_negative_time() -> None:
    odd = record()
    odd.placed_s, odd.prefill_started_s = 10.2, 10.1
    assert min(odd.stages_s().values()) >= 0.0


@pytest.mark.parametrize("counts", [(9,), (1, 8), (2, 3, 4), (1,) * 9, (1, 1, 7)])
@pytest.mark.parametrize("kept", range(1, 10))
def test_tokens_after_the_end_of_an_answer_leave_no_trace(
    counts: tuple[int, ...], kept: int
) -> None:
    """The record must equal that of an answer without these tokens."""
    whole, one_by_one = record(), record()
    at_s = 10.5
    for count in counts:
        at_s += 0.2 * count
        whole.note_tokens(count, at_s, 0.2)
    whole.end_at(kept)
    for number in range(kept):
        one_by_one.note_tokens(1, 10.5 + 0.2 * (number + 1), 0.2)
    assert whole.num_generated_tokens == kept and whole.num_surplus_tokens == 9 - kept
    assert whole.gaps_s == pytest.approx(one_by_one.gaps_s)
    assert whole.ttft_s == pytest.approx(one_by_one.ttft_s)
    assert whole.last_token_s == pytest.approx(one_by_one.last_token_s)
    assert whole.tpot_s == pytest.approx(one_by_one.tpot_s)


def test_an_answer_that_another_head_began_has_no_ttft() -> None:
    later = record(ttft_s=1.0)
    later.tokens_before = 3
    later.note_tokens(2, 99.0, 0.05)
    later.outcome = "stop"
    assert (later.ttft_s, later.answer_tokens, later.num_generated_tokens) == (None, 5, 2)
    assert later.effective, "its TBT is within the SLO, and its TTFT is unknown"
    later.end_at(4)
    assert (later.answer_tokens, later.num_surplus_tokens) == (4, 1)


def test_the_stages_are_those_of_the_attempt_that_answered() -> None:
    twice = record()
    twice.begin_attempt(10.1)
    twice.prefill_started_s, twice.cached_tokens = 10.2, 8
    twice.end_prefill(10.4)
    twice.begin_attempt(11.0)  # the first attempt failed before its first token
    assert (twice.prefill_started_s, twice.prefill_done_s, twice.cached_tokens) == (None, None, 0)
    twice.prefill_started_s = 11.1
    twice.end_prefill(11.5)
    twice.note_tokens(1, 11.6)
    twice.begin_attempt(14.0)  # this attempt fails after its first token
    twice.end_prefill(14.5)
    twice.note_tokens(1, 15.0)
    twice.finished_s = 15.0
    assert sum(twice.stages_s().values()) == pytest.approx(5.0)
    assert twice.stages_s()["prefill"] == pytest.approx(0.4)
    assert twice.stages_s()["placement"] == pytest.approx(1.0)
