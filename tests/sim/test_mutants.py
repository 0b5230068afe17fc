"""Tests that every planted bug is found by its check, and that the case passes without the bug."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.sim.mutants.checks import CHECKS
from tests.sim.mutants.mutant import Mutant, failure_of, find
from tests.sim.mutants.registry import MUTANTS

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "mutants.json"
MAX_CASES = 1500
QUICK = {
    "keys that collide",
    "tenants share",
    "a reader's hold ends when it is granted",
    "retries start over",
    "the index keeps the blocks of a lost instance",
    "reservations never end",
}


def _known() -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(RESULTS.read_text())["mutants"]}


def _cases(mutant: Mutant) -> list[int]:
    """Returns all cases, first the case that found the mutant last time."""
    case = _known().get(mutant.name, {}).get("case")
    return [*([case] if case is not None else []), *range(MAX_CASES)]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in QUICK else pytest.mark.long) for n in MUTANTS],
)
def test_a_planted_bug_is_found(name: str) -> None:
    mutant = MUTANTS[name]
    found = find(mutant, _cases(mutant))
    assert found is not None
    assert not failure_of(CHECKS[mutant.check].run, found.case), "it fails without the bug"


def test_the_committed_table_has_every_mutant() -> None:
    rows = _known()
    assert list(rows) == list(MUTANTS)
    assert len(rows) >= 60
    for name, row in rows.items():
        assert row["case"] is not None, f"{name} was not found"
        assert tuple(row["like"]) == MUTANTS[name].like


def test_at_least_thirty_mutants_are_bugs_that_others_had() -> None:
    assert sum(bool(mutant.like) for mutant in MUTANTS.values()) >= 30
