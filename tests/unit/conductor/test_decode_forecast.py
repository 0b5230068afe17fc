"""Tests `IntervalForecast` against a naive forecast that evaluates every request."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moonpool.conductor.forecast.decode_forecast import (
    INTERVAL_BUCKET_S,
    NUM_INTERVAL_BUCKETS,
    DecodeInterval,
    IntervalForecast,
)

SECONDS = st.integers(0, 160).map(lambda quarters: quarters * INTERVAL_BUCKET_S)
RING_S = NUM_INTERVAL_BUCKETS * INTERVAL_BUCKET_S


@dataclass
class Known:
    interval: DecodeInterval
    begins_s: float
    ends_s: float
    tokens: int


class ForecastMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.forecast = IntervalForecast()
        self.now = 0.0
        self.known: list[Known] = []

    @rule(passed_s=SECONDS, leap=st.sampled_from((0.0, 0.0, 0.0, RING_S / 2, RING_S + 7)))
    def wait(self, passed_s: float, leap: float) -> None:
        self.now += passed_s + leap

    @rule(wait_s=SECONDS, lasts_s=SECONDS, tokens=st.integers(1, 99))
    def enter(self, wait_s: float, lasts_s: float, tokens: int) -> None:
        begins_s = self.now + wait_s
        interval = self.forecast.enter(begins_s, lasts_s, tokens, self.now)
        self.known.append(Known(interval, begins_s, begins_s + lasts_s, tokens))

    @rule(lasts_s=SECONDS)
    def begin(self, lasts_s: float) -> None:
        for known in self.known:
            if not known.interval.decoding:
                self.forecast.begin(known.interval, lasts_s, self.now)
                known.begins_s, known.ends_s = self.now, self.now + lasts_s
                return

    @rule(lasts_s=SECONDS)
    def prolong(self, lasts_s: float) -> None:
        for known in self.known:
            if known.interval.decoding:
                self.forecast.prolong(known.interval, lasts_s, self.now)
                known.ends_s = self.now + lasts_s
                return

    @rule(place=st.integers(0, 5))
    def leave(self, place: int) -> None:
        if place < len(self.known):
            self.forecast.leave(self.known.pop(place).interval, self.now)

    @rule(ahead_s=SECONDS)
    def project(self, ahead_s: float) -> None:
        at_s = self.now + ahead_s
        there = [k for k in self.known if k.begins_s <= at_s < k.ends_s]
        found = self.forecast.project(at_s, self.now)
        assert found == (len(there), sum(k.tokens for k in there))

    @invariant()
    def agrees(self) -> None:
        self.forecast.validate([k.interval for k in self.known])


ForecastMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestForecastMachine = ForecastMachine.TestCase


def test_answers_in_prefill_count_from_the_end_of_their_prefill() -> None:
    forecast = IntervalForecast()
    forecast.enter(begins_s=5.0, duration_s=10.0, context_tokens=700, now=0.0)
    assert forecast.project(4.0, 0.0) == (0, 0)
    assert forecast.project(5.0, 0.0) == (1, 700)
    assert forecast.project(14.5, 0.0) == (1, 700)
    assert forecast.project(15.0, 0.0) == (0, 0)


def test_times_beyond_the_ring_are_capped() -> None:
    forecast = IntervalForecast()
    interval = forecast.enter(begins_s=1e6, duration_s=1e6, context_tokens=1, now=0.0)
    assert forecast.project(900.0, 0.0) == (0, 0)
    forecast.leave(interval, 2e6)
    forecast.validate([])
    assert forecast.project(3e6, 2e6) == (0, 0)


def test_durations_are_learned() -> None:
    forecast = IntervalForecast()
    assert forecast.mean_s is None
    for seconds in (4.0, 8.0):
        forecast.observe(seconds)
    assert forecast.mean_s == pytest.approx(6.0), "the plain mean at first"
    for _ in range(1000):
        forecast.observe(20.0)
    assert forecast.mean_s == pytest.approx(20.0, rel=0.01), "what is old fades"


def test_its_error_is_measured_when_the_time_comes() -> None:
    forecast = IntervalForecast()
    for _ in range(3):
        forecast.enter(begins_s=2.0, duration_s=10.0, context_tokens=1, now=0.0)
    forecast.note_projection(3.0, forecast.project(3.0, 0.0)[0])
    # in the same quarter of a second, only the first projection counts
    forecast.note_projection(3.1, 99)
    one = forecast.enter(begins_s=2.0, duration_s=10.0, context_tokens=1, now=0.0)
    forecast.begin(one, 10.0, now=2.0)
    assert forecast.error.count == 0
    forecast.project(5.0, now=3.5)
    assert forecast.error.count == 1
    assert forecast.error.mean == 2.0 and forecast.error.mean_absolute == 2.0
