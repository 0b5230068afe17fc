"""Tests the bench's own arithmetic, and one run of the bench."""

from __future__ import annotations

import pytest

from benchmarks.suite.cluster.autoscale import ScaledDay, run_day, saving


def test_the_saving_is_against_fixed_numbers_that_serve_as_many() -> None:
    runs = [
        {"name": "few", "load": None, "effective": 50, "usd": 10.0},
        {"name": "enough", "load": None, "effective": 90, "usd": 40.0},
        {"name": "many", "load": None, "effective": 95, "usd": 60.0},
        {"name": "scaled", "load": 0.7, "effective": 80, "usd": 30.0},
        {"name": "roomy", "load": 0.5, "effective": 99, "usd": 50.0},
    ]
    assert saving(runs) == {"scaled": 0.25, "roomy": None}


@pytest.mark.long
def test_a_run_counts_hours_and_price() -> None:
    day = ScaledDay(prefill=1, decode=1, load=None, boot_s=0.0, seed=1, day_s=120.0)
    found = run_day(day)
    assert found["requests"] > 20 and found["usd"] > 0
    hours = found["instance_hours"]
    assert hours["prefill"] == hours["decode"] > 0.03
