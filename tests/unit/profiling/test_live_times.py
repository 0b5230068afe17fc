"""Tests how a client of a live cluster derives the times of steps and prefills."""

from __future__ import annotations

import pytest

from moonpool.request_record import RequestRecord
from moonpool.types import RequestId
from moonpool_lab.profiling.live_profile import (
    DECODE_TOKENS,
    TimedPart,
    common_step_s,
    prefill_time_s,
)
from moonpool_lab.replay.stream import NO_SLO


def timed(instants_s: list[float]) -> TimedPart:
    return TimedPart(RequestRecord(RequestId("probe"), 4, NO_SLO, 0.0), {}, tuple(instants_s))


def test_steps_are_timed_while_all_answers_run() -> None:
    early = timed([0.1 * n for n in range(40)])
    late = timed([0.5 + 0.1 * n for n in range(40)])
    assert common_step_s([early, late]) == pytest.approx(0.1)


def test_answers_that_overlap_too_shortly_have_no_step() -> None:
    early = timed([0.1 * n for n in range(DECODE_TOKENS)])
    late = timed([2.0 + 0.1 * n for n in range(DECODE_TOKENS)])
    assert common_step_s([early, late]) is None


def test_tokens_that_come_in_one_bunch_have_no_step() -> None:
    """Tokens may come together, as from a delayed head. The code must not divide by a step time of
    0."""
    bunch = timed([1.0] * 40)
    assert common_step_s([bunch, bunch]) is None


def test_a_prefill_whose_reports_come_together_has_its_time() -> None:
    prompt = {"queue_and_fetch": 0.002, "prefill": 0.040}
    together = {"queue_and_fetch": 0.0418, "prefill": 0.0002}
    assert prefill_time_s(prompt, 0.002) == pytest.approx(0.040)
    assert prefill_time_s(together, 0.002) == pytest.approx(0.040)
