"""Tests the bench's own arithmetic, and one run of the bench."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.suite.cluster.role_balance import RoleBalanceRun, compare, run_apart


def figures(prefill: int, mode: str, share: float, **known: Any) -> dict[str, Any]:
    return {
        "prefill": prefill,
        "decode": 3 - prefill,
        "mode": mode,
        "effective_share": share,
        "day_s": 1.0,
        "switches": 0,
        **known,
    }


def test_switching_is_held_against_the_best_fixed_split() -> None:
    found = compare(
        [
            figures(1, "advise", 0.5),
            figures(2, "advise", 0.8),
            figures(1, "switch", 0.9, switches=4),
            figures(1, "advise", 0.7),
            figures(2, "advise", 0.6),
            figures(1, "switch", 0.8, switches=4),
            figures(8, "switch", 0.99, day_s=0.0, switches=1),
        ]
    )
    assert found["best_fixed"] == "2P+1D"
    assert found["effective_share"] == {"1P+2D": 0.6, "2P+1D": 0.7, "switching": 0.85}
    assert found["switching_over_best_fixed"] == 1.2143
    assert found["switches_under_constant_load"] == [1]


@pytest.mark.long
def test_a_run_apart_tells_its_figures() -> None:
    run = RoleBalanceRun(prefill=1, decode=1, mode="switch", window_s=30.0, seed=1, day_s=300.0)
    found = run_apart(run)
    assert found["requests"] > 50
    assert found["name"] == "shifting day 1P+1D switch" and found["switches"] == 0
