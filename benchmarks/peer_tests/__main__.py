"""Fetches the suites, runs them against live servers, and prints a table for each suite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from benchmarks.checkout import ROOT
from benchmarks.clients.environments import InstallError, python_environment
from benchmarks.clients.page import PAGE as CLIENTS_PAGE
from benchmarks.clients.page import current
from benchmarks.peer_tests.archives import ArchiveError, unpacked
from benchmarks.peer_tests.running import FileResult, RunSetup, run_file, test_files
from benchmarks.peer_tests.served_model import write_adapter, write_model
from benchmarks.peer_tests.suites import HERE, SUITES, Suite, SuiteError, read_suite
from benchmarks.peer_tests.table import RESULTS, figures, merged, table
from moonpool.cli.output import fail, one_line, origin, write_json
from moonpool.text.model_error import ModelError
from moonpool.text.tokenizer import TokenizerError

FOLDER = ROOT / "build" / "peer-tests"


@click.command()
@click.argument("words", nargs=-1)
@click.option("--suite", "names", type=click.Choice(SUITES), multiple=True, help="Run only this.")
@click.option(
    "--folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=FOLDER,
    help="Folder of what is fetched, and of the logs.",
)
@click.option("--with-skipped", is_flag=True, help="Run the skipped tests, too; say which pass.")
@click.option(
    "--write", is_flag=True, help="Write these files' rows of the results, and docs/clients.md."
)
def peer_tests(
    words: tuple[str, ...], names: tuple[str, ...], folder: Path, with_skipped: bool, write: bool
) -> None:
    """Run the server tests of vLLM and llama.cpp; with WORDS only files with one in their name.

    The exit status is 1 if a test failed, or if a skip names no test.
    """
    if write and with_skipped:
        fail("--write wants a run without --with-skipped")
    began = origin() | {"command": "python -m benchmarks.peer_tests --write"}
    folder = folder.absolute()
    found: list[dict[str, Any]] = []
    is_bad = False
    with one_line(ArchiveError, InstallError, SuiteError, ModelError, TokenizerError, OSError):
        python = python_environment(_packages(), folder / "environment")
        model = write_model(python, folder)
        adapter = write_adapter(model, folder / "adapter")
        for name in names or SUITES:
            suite = read_suite(name)
            tests = unpacked(suite, folder)
            setup = RunSetup(python, tests, folder / "results", model, adapter)
            results, left_out = _run(suite, setup, words, with_skipped)
            found.append(figures(suite, results, left_out))
            if results or left_out:
                click.echo(f"\n{suite.title}\n\n{table(found[-1])}\n")
            is_bad |= _tell(suite, results, [] if words else list(left_out))
    if not any(each["files"] or each["left_out"] for each in found):
        fail(f"no file of tests has {' or '.join(words)} in its name")
    if write:
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"suites": []}
        write_json(str(RESULTS), {"suites": merged(known["suites"], found), "origin": began})
        CLIENTS_PAGE.write_text(current())
    raise SystemExit(is_bad)


def _packages() -> tuple[str, ...]:
    lines = (HERE / "packages.txt").read_text().splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


def _run(
    suite: Suite, setup: RunSetup, words: tuple[str, ...], with_skipped: bool
) -> tuple[list[FileResult], dict[str, str]]:
    """Returns the results of the files that were run, and the reason for each file that was not."""
    results: list[FileResult] = []
    left_out: dict[str, str] = {}
    for file in test_files(suite, setup):
        skip = suite.skip(file)
        if words and not any(word in file for word in words):
            continue
        if skip is not None and not (with_skipped and words):
            left_out[file] = skip.reason
            continue
        results.append(run_file(suite, file, setup, with_skipped))
        r = results[-1]
        number = sum(r.skipped.values())
        click.echo(f"{file}: {r.passed} passed, {len(r.failed)} failed, {number} skipped", err=True)
    return results, left_out


def _tell(suite: Suite, results: list[FileResult], left_out: list[str]) -> bool:
    """Prints the faults to repair, and returns whether there are any. `left_out`: the files that
    were not run. After a run of chosen files `left_out` is empty, and only the skips in these files
    are compared."""
    endings = {test: ending for r in results for test, ending in r.endings.items()}
    for test, ending in endings.items():
        if ending == "passed" and suite.skip(test):
            click.echo(f"PASSED, though skipped: {test}")
    files = {r.file for r in results}
    stale = [
        pattern
        for pattern in suite.unmatched([*endings, *left_out])
        if left_out or pattern.partition("::")[0] in files
    ]
    for pattern in stale:
        click.echo(f"NO TEST is named by the skip {pattern}")
    failed = {test: remark for r in results for test, remark in r.failed.items()}
    for test, remark in failed.items():
        click.echo(f"FAILED {test}: {remark}")
    return bool(failed or stale)


if __name__ == "__main__":
    peer_tests(prog_name="python -m benchmarks.peer_tests")
