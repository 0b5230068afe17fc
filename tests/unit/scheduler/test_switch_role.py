"""Tests the role of an instance, which the Conductor may change at any moment."""

from __future__ import annotations

from test_instance import Bench, attempt, reported

from moonpool.protocol.messages import (
    PrefillStarted,
    RoleChanged,
    StartPrefill,
    StepTokens,
    SwitchRole,
)
from moonpool.types import Role


def test_the_new_role_is_reported_and_attempts_continue() -> None:
    bench = Bench(Role.MIXED)
    bench.handle(StartPrefill(attempt=attempt("a")))
    bench.end_step()
    assert reported(bench.handle(SwitchRole(role=Role.PREFILL)), RoleChanged) == [
        RoleChanged(role=Role.PREFILL)
    ]
    assert bench.instance.role is Role.PREFILL
    assert reported(bench.end_step(), StepTokens)


def test_cached_blocks_stay_hits_after_the_switch() -> None:
    bench = Bench(Role.DECODE)
    bench.handle(StartPrefill(attempt=attempt("a")))
    while bench.step is not None:
        bench.end_step()
    bench.assert_empty()
    bench.handle(SwitchRole(role=Role.PREFILL))
    (started,) = reported(bench.handle(StartPrefill(attempt=attempt("b"))), PrefillStarted)
    assert started.cached_tokens > 0
