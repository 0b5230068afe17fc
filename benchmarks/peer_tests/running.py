"""Runs the files of a suite, each in a separate pytest process."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from benchmarks.checkout import ROOT
from benchmarks.clients.environments import environment
from benchmarks.peer_tests.suites import HERE, OWN, Suite
from moonpool import __version__
from moonpool_lab.demo.local_server import free_port

FILE_S = 3600.0
"""Longest time that one file of tests may take."""
MAX_MODEL_LEN = 2048
"""The longest context, which overrides the tests' flags, so that an answer without a limit ends."""
LONG = 16384
"""Like MAX_MODEL_LEN, for the files of `Suite.long`: the model's whole context."""


class FileResult(NamedTuple):
    """How the tests of a file ended. `skipped`: number of skipped tests by reason. `failed`: the
    remark on each failed test. `endings`: the outcome of each test."""

    file: str
    passed: int
    skipped: dict[str, int]
    failed: dict[str, str]
    endings: dict[str, str]


class RunSetup(NamedTuple):
    """The inputs of a run: the tests' Python, the suite's folder, the results' folder, the
    model."""

    python: Path
    tests: Path
    results: Path
    model: Path
    adapter: Path


def test_files(suite: Suite, setup: RunSetup) -> list[str]:
    """Returns the files with tests, including files that are skipped as a whole."""
    root = setup.tests / suite.root
    found = {path for pattern in suite.tests for path in root.glob(pattern)}
    return sorted(str(path.relative_to(root)) for path in found)


def run_file(suite: Suite, file: str, setup: RunSetup, with_skipped: bool = False) -> FileResult:
    """`with_skipped`: whether tests that the suite's list leaves out run, too."""
    setup.results.mkdir(parents=True, exist_ok=True)
    name = f"{suite.name}-{file.replace('/', '-')}"
    results = setup.results / f"{name}.json"
    results.unlink(missing_ok=True)
    root = setup.tests / suite.root
    line = [str(setup.python), "-m", "pytest", "-q", "-c", str(HERE / "pytest.ini")]
    line += [f"--rootdir={root}", "-p", "no:cacheprovider", "-p", "no:schemathesis"]
    line += ["-p", "benchmarks.peer_tests.plugins.report"]
    line += ["-p", f"benchmarks.peer_tests.plugins.{suite.name}", file]
    variables = environment() | _variables(suite, file, setup, results)
    variables |= {"PEER_TESTS_ALL": "1"} if with_skipped else {}
    with (setup.results / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            line, cwd=root, stdout=log, stderr=log, env=variables, start_new_session=True
        )
        try:
            process.wait(FILE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            if process.poll() is None:  # the servers belong to its session, too
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if not results.exists():
        said = f"pytest ended with status {process.returncode}: see {log.name}"
        return FileResult(file, 0, {}, {file: said}, {})
    return read_results(suite, file, json.loads(results.read_text())["tests"])


def _variables(suite: Suite, file: str, setup: RunSetup, results: Path) -> dict[str, str]:
    root = setup.tests / suite.root
    launch = _launcher(suite, setup)
    return {
        "PYTHONPATH": os.pathsep.join((str(root), str(ROOT))),
        "PEER_TESTS_SUITE": suite.name,
        "PEER_TESTS_RESULTS": str(results),
        "PEER_TESTS_MODEL": str(setup.model),
        "PEER_TESTS_MAX_LEN": str(LONG if file in suite.long else MAX_MODEL_LEN),
        "PEER_TESTS_ADAPTER": str(setup.adapter),
        "PEER_TESTS_VERSION": __version__,
        "PEER_TESTS_LAUNCH": str(launch),
        "LLAMA_SERVER_BIN_PATH": str(launch),
        "PORT": str(free_port()),
        "HF_HUB_OFFLINE": "1",
    }


def _launcher(suite: Suite, setup: RunSetup) -> Path:
    """Writes the program that replaces the suite's server."""
    path = setup.results / f"{suite.name}-server"
    sources = shlex.quote(f"{ROOT / 'src'}:{ROOT}")
    module = f"-m benchmarks.peer_tests.translated {suite.name}"
    python = shlex.quote(sys.executable)
    path.write_text(f'#!/bin/sh\nPYTHONPATH={sources} exec {python} {module} "$@"\n')
    path.chmod(0o755)
    return path


def read_results(suite: Suite, file: str, tests: dict[str, dict[str, str]]) -> FileResult:
    skipped: dict[str, int] = {}
    failed = {} if tests else {file: "it has no tests"}
    for test, found in tests.items():
        if found["ending"] in ("failed", "not run"):
            failed[test] = found.get("remark", "it did not run")
        elif found["ending"] == "skipped":
            listed = suite.skip(test)
            reason = listed.reason if listed else f"{OWN}: {found['remark']}"
            skipped[reason] = skipped.get(reason, 0) + 1
    endings = {test: found["ending"] for test, found in tests.items()}
    return FileResult(file, list(endings.values()).count("passed"), skipped, failed, endings)
