"""Tests that moonpool finds the same entry points as Python's own reader."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from moonpool.plugins.entry_points import EXTRA_OF_COMMAND, added_commands, entry_points, load


@pytest.mark.parametrize(
    "group", ["console_scripts", "pytest11", "moonpool.commands", "moonpool.workers", "none"]
)
def test_they_are_those_of_the_library(group: str) -> None:
    expected = {
        point.name: point.value.partition("[")[0].strip()
        for point in reversed(list(importlib.metadata.entry_points(group=group)))
    }
    assert dict(entry_points(group)) == expected
    assert bool(expected) == (group != "none")


def test_the_first_installation_of_a_package_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, value in (("one", "os:sep"), ("two", "os:linesep")):
        info = tmp_path / place / "Some_Package-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "entry_points.txt").write_text(
            f"[other]\nname = os:curdir\n[a.group]  # of ours\nname = {value} [extra]\n"
        )
        monkeypatch.syspath_prepend(str(tmp_path / place))
    assert dict(entry_points("a.group")) == {"name": "os:linesep"}
    assert load("os:linesep") == "\n"


def test_commands_of_other_packages_have_a_line_of_help_or_are_internal() -> None:
    found = added_commands()
    assert {name for name, (_, _, text) in found.items() if text} == EXTRA_OF_COMMAND.keys()
    assert [name for name, (_, _, text) in found.items() if not text] == ["stage", "rank"]
