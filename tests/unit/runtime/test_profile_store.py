"""Tests when stored step times are used, and when they are measured again."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from moonpool.scheduler.actions import StepEntry
from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.calibrate import measure_samples
from moonpool_engine.engine.ops import empty_cache
from moonpool_engine.engine.reference import ReferenceOps
from moonpool_engine.engine.runner import Engine, make_layout
from moonpool_engine.engine.step import StepResult
from moonpool_engine.worker.profile_store import (
    KEPT_S,
    clear_profiles,
    kept_profiles,
    measure_profile,
    profile_path,
    profiles_folder,
    refine_profile,
)

NAME = "random:hidden=64,layers=2,heads=4,kv_heads=2,inter=96,vocab=300,context=512"


class CountingEngine:
    """An engine that counts its steps, and reports that each token takes `token_s`."""

    def __init__(self, token_s: float) -> None:
        model = open_model(NAME, "float32")
        self._engine = Engine(model, ReferenceOps(), empty_cache(make_layout(model, 16), 64))
        self._token_s = token_s
        self.spec, self.layout = self._engine.spec, self._engine.layout
        self.num_blocks, self.ops_name = self._engine.num_blocks, self._engine.ops_name
        self.steps: list[int] = []  # the number of tokens of each step

    def step(self, entries: Sequence[StepEntry]) -> StepResult:
        tokens = sum(len(entry.new_token_ids) for entry in entries)
        self.steps.append(tokens)
        return StepResult([None] * len(entries), seconds=tokens * self._token_s)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def test_stored_times_are_used_until_they_are_old() -> None:
    engine = CountingEngine(1e-4)
    first = refine_profile(engine, 1)
    assert engine.steps
    engine.steps.clear()
    assert refine_profile(engine, 1) == first and engine.steps == [1, 1]
    path = profile_path(engine, 1)
    engine.steps.clear()
    old_s = path.stat().st_mtime - KEPT_S - 60
    os.utime(path, (old_s, old_s))
    assert refine_profile(engine, 1, only_if_new=True) == first and not engine.steps
    refine_profile(engine, 1)
    assert engine.steps and path.stat().st_mtime > old_s + KEPT_S


def test_times_of_a_busy_machine_are_replaced_at_the_next_start() -> None:
    """The busy start measured other steps than the second start, because it was slow."""
    busy, quiet = CountingEngine(0.5), CountingEngine(1e-4)
    refine_profile(busy, 1)
    assert profile_path(busy, 1) == profile_path(quiet, 1)
    kept = refine_profile(quiet, 1, only_if_new=True)
    assert kept.decode_step_s(1, 64) > 0.4 and not quiet.steps
    found = refine_profile(quiet, 1)
    assert found.decode_step_s(1, 64) < 1e-3 and found.prefill_s(64, 0) < 0.01
    quiet.steps.clear()
    assert refine_profile(quiet, 1) == found and quiet.steps == [1, 1]


def test_a_stopped_process_with_the_lock_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("moonpool_engine.worker.profile_store.LOCK_S", 0.0)
    engine = CountingEngine(1e-4)
    path = profile_path(engine, 1).with_suffix(".lock")
    path.parent.mkdir(parents=True)
    with path.open("w") as other, caplog.at_level(logging.WARNING):
        fcntl.flock(other, fcntl.LOCK_EX)
        refine_profile(engine, 1)
    assert engine.steps and f"the process that holds {path}" in caplog.text


def test_a_slow_model_is_measured_in_brief() -> None:
    """A token takes 16 ms, so that all steps of the long list would take half a minute."""
    fast, slow = CountingEngine(1e-4), CountingEngine(0.05)
    refine_profile(fast, 1)
    cost = refine_profile(slow, 2)
    assert sum(slow.steps) < 120 < sum(fast.steps)
    assert cost.prefill_s(256, 0) == pytest.approx(256 * 0.05, rel=0.1)
    assert cost.decode_step_s(4, 256) == pytest.approx(4 * 0.05, rel=0.1)


def test_a_model_without_kernels_is_measured_by_few_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each step takes 2 s on a clock that only steps move."""
    now_s = 0.0
    engine = CountingEngine(0.0)
    step = engine.step

    def slow(entries: Sequence[StepEntry]) -> StepResult:
        nonlocal now_s
        now_s += 2.0
        found = step(entries)
        return StepResult(found.tokens, seconds=2.0 + 0.01 * engine.steps[-1])

    monkeypatch.setattr(engine, "step", slow)
    monkeypatch.setattr("moonpool_engine.engine.calibrate.time.perf_counter", lambda: now_s)
    cost = refine_profile(engine, 1)
    assert engine.steps == [1, 4, 4, 32, 1]
    assert cost.prefill_s(32, 0) == pytest.approx(2.32) and cost.decode_step_s(1, 64) > 2.0
    thorough = [each.kind for each in measure_samples(engine)]
    assert [thorough.count(kind) for kind in ("prefill", "decode", "mixed")] == [3, 3, 3]


def test_a_measurement_that_is_not_to_be_kept_writes_nothing(tmp_path: Path) -> None:
    measure_profile(CountingEngine(1e-4), 1, 0.0, lambda sample: None, keep=False)
    assert list(tmp_path.iterdir()) == [] and kept_profiles() == []


def test_kept_times_are_listed_and_cleared() -> None:
    engine = CountingEngine(1e-4)
    refine_profile(engine, 1)
    measure_profile(engine, 2, 0.0, lambda sample: None)
    found = kept_profiles()
    assert [each.threads for each in found] == [2, 1]
    assert {each.path for each in found} == {str(profile_path(engine, n)) for n in (1, 2)}
    assert found[0].describe().startswith("llama, 2 layers, 0.1 million parameters, ")
    assert found[0].describe().endswith(", 2 threads")
    strange = profiles_folder() / "notes.json"
    strange.write_text("mine")
    clear_profiles()
    assert kept_profiles() == [] and list(profiles_folder().iterdir()) == [strange]


def test_times_of_an_earlier_release_are_used_and_listed() -> None:
    engine = CountingEngine(1e-4)
    first = refine_profile(engine, 1)
    path = profile_path(engine, 1)
    path.write_bytes(msgspec.json.encode(msgspec.json.decode(path.read_bytes())["samples"]))
    engine.steps.clear()
    assert refine_profile(engine, 1) == first and engine.steps == [1, 1]
    assert [each.describe() for each in kept_profiles()] == [""]


def test_a_damaged_file_is_listed_and_measured_again() -> None:
    engine = CountingEngine(1e-4)
    path = profile_path(engine, 1)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"{")
    assert [each.path for each in kept_profiles()] == [str(path)]
    refine_profile(engine, 1)
    assert engine.steps and kept_profiles()[0].threads == 1
