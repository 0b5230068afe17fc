"""A role is what the Conductor gives an instance to do: it may change at any moment."""

from __future__ import annotations

from test_instance import Bench, told, work

from moonpool.types import Role
from moonpool.workers.messages import (
    PrefillStarted,
    RoleChanged,
    StartPrefill,
    StepTokens,
    SwitchRole,
)


def test_the_instance_says_what_it_is_now_and_its_works_go_on() -> None:
    bench = Bench(Role.MIXED)
    bench.handle(StartPrefill(work=work("a")))
    bench.end_step()
    assert told(bench.handle(SwitchRole(role=Role.PREFILL)), RoleChanged) == [
        RoleChanged(role=Role.PREFILL)
    ]
    assert bench.instance.role is Role.PREFILL
    assert told(bench.end_step(), StepTokens)


def test_what_it_cached_before_is_a_hit_after() -> None:
    bench = Bench(Role.DECODE)
    bench.handle(StartPrefill(work=work("a")))
    while bench.step is not None:
        bench.end_step()
    bench.assert_empty()
    bench.handle(SwitchRole(role=Role.PREFILL))
    (started,) = told(bench.handle(StartPrefill(work=work("b"))), PrefillStarted)
    assert started.cached_tokens > 0
