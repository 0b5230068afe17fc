"""Tests `SurvivalForecast` against a naive forecast that evaluates every request, and against the
paper's t_d."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from moonpool.conductor.forecast.decode_forecast import (
    NUM_SURVIVAL_BUCKETS,
    SURVIVAL_BUCKET_S,
    DecodeInterval,
    SurvivalForecast,
)

SECONDS = st.integers(0, 80).map(lambda halves: halves * SURVIVAL_BUCKET_S)
RING_S = NUM_SURVIVAL_BUCKETS * SURVIVAL_BUCKET_S


@dataclass
class Known:
    interval: DecodeInterval
    begins_s: float
    tokens: int
    decoding: bool = False


class SurvivalMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.forecast = SurvivalForecast()
        for seconds in range(1, 33):
            self.forecast.observe(float(seconds))
        self.now = 0.0
        self.known: list[Known] = []

    @rule(passed_s=SECONDS, leap=st.sampled_from((0.0, 0.0, 0.0, RING_S / 2, RING_S + 7)))
    def wait(self, passed_s: float, leap: float) -> None:
        self.now += passed_s + leap

    @rule(wait_s=SECONDS, tokens=st.integers(1, 99))
    def enter(self, wait_s: float, tokens: int) -> None:
        begins_s = self.now + wait_s
        interval = self.forecast.enter(begins_s, 0.0, tokens, self.now)
        self.known.append(Known(interval, begins_s, tokens))

    @rule()
    def begin(self) -> None:
        for known in self.known:
            if not known.decoding:
                self.forecast.begin(known.interval, 0.0, self.now)
                known.begins_s, known.decoding = self.now, True
                return

    @rule(place=st.integers(0, 5))
    def leave(self, place: int) -> None:
        if place < len(self.known):
            self.forecast.leave(self.known.pop(place).interval, self.now)

    def lasts(self, seconds: float) -> float:
        survival = self.forecast.survival
        return float(survival[min(int(seconds / SURVIVAL_BUCKET_S), NUM_SURVIVAL_BUCKETS - 1)])

    @rule(ahead_s=SECONDS)
    def project(self, ahead_s: float) -> None:
        at_s = self.now + ahead_s
        count = tokens = 0.0
        for known in self.known:
            if known.decoding:
                age_s = self.now - known.begins_s
                share = self.lasts(min(age_s, RING_S) + ahead_s) / self.lasts(age_s)
            else:
                begins_s = max(known.begins_s, self.now)
                share = self.lasts(at_s - begins_s) if begins_s <= at_s else 0.0
            count += share
            tokens += share * known.tokens
        found = self.forecast.project(at_s, self.now)
        assert found == (pytest.approx(count, abs=0.1), pytest.approx(tokens, abs=0.1))

    @invariant()
    def agrees(self) -> None:
        self.forecast.validate([k.interval for k in self.known])


SurvivalMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSurvivalMachine = SurvivalMachine.TestCase


def test_it_sees_the_long_answers_that_a_mean_duration_overlooks() -> None:
    """In a steady stream of answers, nine of ten are short. On average, as many answers are under
    way as begin in the mean duration. The paper's rule counts only the answers that are younger
    than the mean duration."""
    rng = random.Random(5)
    forecast = SurvivalForecast()
    ends: list[tuple[float, DecodeInterval, float]] = []
    seen, actual, younger = 0.0, 0, 0
    for step in range(4000):
        now = step * 0.25
        for one in [e for e in ends if e[0] <= now]:
            ends.remove(one)
            forecast.leave(one[1], now)
            forecast.observe(one[2])
        lasts_s = 2.0 if rng.random() < 0.9 else 52.0  # the mean is 7 s
        interval = forecast.enter(now, 0.0, 1, now)
        forecast.begin(interval, 0.0, now)
        ends.append((now + lasts_s, interval, lasts_s))
        if step > 1000:
            seen += forecast.project(now + 10.0, now)[0]
            actual += sum(end > now + 10.0 for end, _, _ in ends)
            younger += sum(now + 10.0 - (end - lasts) < 7.0 for end, _, lasts in ends)
    assert seen == pytest.approx(actual, rel=0.1)
    assert younger < 0.1 * actual


def test_old_durations_fade() -> None:
    forecast = SurvivalForecast()
    assert forecast.mean_s is None
    for _ in range(500):
        forecast.observe(1.0)
    assert forecast.mean_s == pytest.approx(1.0)
    assert forecast.survival[20] < 0.02
    for _ in range(10_000):
        forecast.observe(30.0)
    assert forecast.mean_s == pytest.approx(30.0, rel=0.01)
    assert forecast.survival[20] > 0.98


def test_its_error_is_measured_when_the_time_comes() -> None:
    forecast = SurvivalForecast()
    interval = forecast.enter(0.0, 0.0, 1, 0.0)
    forecast.begin(interval, 0.0, 0.0)
    forecast.note_projection(2.0, 3.0)
    forecast.project(1.0, 1.0)
    assert forecast.error.count == 0
    forecast.project(9.0, 3.0)
    assert (forecast.error.mean, forecast.error.mean_absolute) == (2.0, 2.0)
