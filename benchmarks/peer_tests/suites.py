"""The suites and the tests that are left out of them, as their TOML files state."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
SUITES = ("vllm", "llama_cpp")
OWN = "the suite itself leaves it out"
"""Reason of tests that skip themselves, which precedes their own reason."""


_TEXTS = ("title", "url", "sha256", "root")


class SuiteError(ValueError):
    """A suite's file is not valid; the text says where."""


class Skip(NamedTuple):
    """Tests that are not run: `*` in the pattern stands for any text, and all other characters for
    themselves. A pattern without `::` names whole files."""

    pattern: str
    reason: str

    def matches(self, test: str) -> bool:
        """Whether the pattern matches the test, in pytest's form FILE::NAME."""
        parts = (re.escape(part) for part in self.pattern.split("*"))
        name = test if self.is_of_tests else test.partition("::")[0]
        return re.fullmatch(".*".join(parts), name, re.DOTALL) is not None

    @property
    def is_of_tests(self) -> bool:
        return "::" in self.pattern


class Suite(NamedTuple):
    """The tests of one project."""

    name: str
    title: str
    url: str
    sha256: str
    members: tuple[str, ...]
    """Folders and files of the archive that are unpacked, below its only folder."""
    root: str
    """The folder that the tests' names are relative to, below the archive's only folder."""
    tests: tuple[str, ...]
    """Patterns of the files with tests below `root`, in the form that `Path.glob` takes."""
    long: tuple[str, ...]
    """Files whose servers get the context length from their flags, however long it is."""
    skips: tuple[Skip, ...]

    def skip(self, test: str) -> Skip | None:
        """The first skip that names the test, or the file, if any."""
        return next((skip for skip in self.skips if skip.matches(test)), None)

    def unmatched(self, tests: Iterable[str]) -> list[str]:
        """Returns the patterns that name none of the tests, or of the files."""
        names = list(tests)
        return [s.pattern for s in self.skips if not any(s.matches(name) for name in names)]


def read_suite(name: str) -> Suite:
    """Raises SuiteError, OSError."""
    return parse(name, (HERE / f"{name}.toml").read_text())


def parse(name: str, text: str) -> Suite:
    """Raises SuiteError."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SuiteError(f"{name}.toml: {error}") from None
    skips = _skips(name, table.pop("skip", []))
    members, tests, long = (tuple(table.pop(key, ())) for key in ("members", "tests", "long"))
    if set(table) != set(_TEXTS):
        raise SuiteError(f"{name}.toml has {', '.join(table)} in place of {', '.join(_TEXTS)}")
    title, url, sha256, root = (str(table[key]) for key in _TEXTS)
    return Suite(name, title, url, sha256, members, root, tests, long, skips)


def _skips(name: str, tables: list[dict[str, Any]]) -> tuple[Skip, ...]:
    skips: list[Skip] = []
    for table in tables:
        if set(table) != {"reason", "tests"} or not table["reason"] or not table["tests"]:
            raise SuiteError(f"{name}.toml: each [[skip]] has a reason and tests, not {table}")
        skips += [Skip(pattern, table["reason"]) for pattern in table["tests"]]
    patterns = [skip.pattern for skip in skips]
    twice = sorted({pattern for pattern in patterns if patterns.count(pattern) > 1})
    if twice:
        raise SuiteError(f"{name}.toml: skipped twice: {', '.join(twice)}")
    return tuple(skips)
