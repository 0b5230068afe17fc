"""Runs the tests of one part of a counterpart, and counts their outcomes."""

from __future__ import annotations

import json
import os
import re
import site
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.checkout import ROOT
from benchmarks.compatibility.counterparts import Counterpart, Part

MODEL_VARIABLE = "MOONPOOL_VLLM_MODEL"
_VERSIONS = """
import json, platform, sys
from importlib.metadata import PackageNotFoundError, version
def of(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
print(json.dumps({"Python": platform.python_version()} | {n: of(n) for n in sys.argv[1:]}))
"""
_PATH = re.compile(r"(?<![\w:/.])/(?:tmp|root|home|work)/\S+")


class PlaceError(Exception):
    """The named file or folder is not the counterpart; the text says why."""


def versions_of(counterpart: Counterpart, place: str) -> dict[str, str]:
    """Versions by name, the counterpart's own first. Raises PlaceError."""
    if counterpart.place == "program":
        return {counterpart.name: _program_version(place)}
    try:
        done = subprocess.run(
            [place, "-c", _VERSIONS, *counterpart.packages],
            capture_output=True,
            check=False,
            env=_environment(counterpart, place, {}),
            text=True,
        )
    except OSError as error:
        raise PlaceError(f"{place}: {error.strerror}") from None
    if done.returncode or not done.stdout.startswith("{"):
        raise PlaceError(f"{place} is no Python")
    told = {name: found for name, found in json.loads(done.stdout).items() if found}
    first = counterpart.packages[0] if counterpart.packages else "Python"
    if first not in told:
        raise PlaceError(f"{place} has no {first}")
    return {first: told.pop(first)} | told


def _program_version(program: str) -> str:
    try:
        done = subprocess.run(
            [program, "--version"], capture_output=True, check=False, text=True, timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PlaceError(f"{program} does not tell its version: {error}") from None
    found = re.search(r"version:?\s*(.+)", done.stdout + done.stderr)
    if found is None:
        raise PlaceError(f"{program} does not tell its version")
    return found[1].strip()


def run_part(
    counterpart: Counterpart, part: Part, place: str, more: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the outcomes of a part's tests. `more`: further environment variables for the
    tests."""
    python = place if counterpart.place == "environment" else sys.executable
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        line = [python, "-m", "pytest", *part.tests, "-m", "", "-q", "-p", "no:cacheprovider"]
        line += ["-n", "0", f"--junitxml={report}", *(["-k", part.only] if part.only else [])]
        subprocess.run(
            line, cwd=ROOT, check=False, env=_environment(counterpart, place, more), stdout=2
        )
        try:
            found = endings(report.read_text())
        except (OSError, ET.ParseError):
            found = endings("")
    if not found["passed"] and not found["failed"] and not found["skipped"]:
        found["failed"] = {"(all)": "no test ran"}
    return found


def _environment(counterpart: Counterpart, place: str, more: Mapping[str, str]) -> dict[str, str]:
    """If the counterpart's own Python has no pytest, it gets the missing packages from this Python.
    A Python with pytest is used unchanged, because packages of both could hide each other's
    parts."""
    told = {**os.environ, **more}
    if counterpart.place != "environment":
        return told | ({counterpart.variable: place} if counterpart.variable else {})
    if Path(place).absolute() == Path(sys.executable).absolute():
        return told
    paths = [ROOT / "src", ROOT / "engine" / "src", ROOT / "lab" / "src", ROOT]
    script = "import sys, importlib.util as u; print(sys.path, bool(u.find_spec('pytest')))"
    own = subprocess.run([place, "-c", script], capture_output=True, check=False, text=True)
    theirs = re.findall(r"'([^']*site-packages)'", own.stdout)
    ours = [] if own.stdout.rstrip().endswith("True") else _packages()
    told["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *theirs, *ours])
    return told


def _packages() -> Sequence[str]:
    """Returns the folders of this Python's packages, including those that a `.pth` file adds."""
    return [path for path in sys.path if path.endswith("site-packages")] or site.getsitepackages()


def endings(report: str) -> dict[str, Any]:
    """Reads pytest's report in JUnit's form."""
    passed, failed, skipped = 0, dict[str, str](), Counter[str]()
    for case in ET.fromstring(report).iter("testcase") if report else ():
        problem = next((e for e in case if e.tag in ("failure", "error")), None)
        skip = case.find("skipped")
        if problem is not None:
            failed[f"{case.get('classname')}::{case.get('name')}"] = _short(problem)
        elif skip is not None:
            skipped[_short(skip)] += 1
        else:
            passed += 1
    return {"passed": passed, "failed": failed, "skipped": dict(sorted(skipped.items()))}


def _short(element: ET.Element) -> str:
    words = " ".join((element.get("message") or element.text or "").split())
    return _PATH.sub("(a path)", words)[:160]
