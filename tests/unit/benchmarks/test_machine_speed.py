"""Tests the machine's speed, and the warning when it has changed."""

from __future__ import annotations

from benchmarks.suite.live.machine_speed import drift_words, loop_s


def test_a_change_is_told_both_ways_and_little_is_not() -> None:
    assert list(drift_words(0.010, 0.011)) == list(drift_words(0.011, 0.010)) == []
    [slower] = drift_words(0.010, 0.015)
    assert "took 1.50 times as long" in slower
    [faster] = drift_words(0.010, 0.005)
    assert "took 0.50 times as long" in faster


def test_the_loop_is_long_enough_for_the_clock() -> None:
    assert 1e-4 < loop_s() < 10
