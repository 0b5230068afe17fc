"""Tests the driver of an instance: actions reach their performers in order, and no action is
lost."""

from __future__ import annotations

import pytest

from moonpool.protocol.messages import PrefillStarted, StartPrefill
from moonpool.scheduler.actions import RunStep, SendReport, StepEnded, WorkerAction
from moonpool.scheduler.instance import Instance, InstanceDriver
from moonpool.scheduler.instance_config import InstanceConfig
from moonpool.types import Role, SamplingParams, Token
from moonpool_lab.solo import solo_attempt
from tests.unit.scheduler.test_instance import COST, LAYOUT

START = StartPrefill(attempt=solo_attempt("a", range(10), SamplingParams(max_tokens=1)))


def make_instance() -> Instance:
    return Instance(InstanceConfig(), LAYOUT, 16, Role.MIXED, COST, ())


def test_each_action_goes_to_its_performer_in_order() -> None:
    done: list[WorkerAction] = []
    driver = InstanceDriver(
        make_instance(), lambda: 0.0, dict.fromkeys((RunStep, SendReport), done.append)
    )
    driver.post(START)
    driver.post(StepEnded((Token(7),), 0.01))
    twin = make_instance()
    expected = [*twin.handle(START, 0.0), *twin.handle(StepEnded((Token(7),), 0.01), 0.0)]
    assert done == expected
    assert any(isinstance(a, SendReport) and isinstance(a.report, PrefillStarted) for a in done)
    assert not driver.instance.requests


def test_an_action_without_performer_is_an_error() -> None:
    driver = InstanceDriver(make_instance(), lambda: 0.0, {SendReport: lambda action: None})
    with pytest.raises(KeyError, match="RunStep"):
        driver.post(START)
