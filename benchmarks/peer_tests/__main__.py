"""Fetches the suites, runs them against live servers, and prints a table for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from benchmarks.checkout import ROOT
from benchmarks.clients.environments import InstallError, python_environment
from benchmarks.peer_tests.archives import ArchiveError, unpacked
from benchmarks.peer_tests.running import FileResult, Place, run_file, test_files
from benchmarks.peer_tests.served_model import write_adapter, write_model
from benchmarks.peer_tests.suites import HERE, SUITES, Suite, SuiteError, read_suite
from benchmarks.peer_tests.table import figures, table
from moonpool.cli.output import fail, origin, write_json
from moonpool.engine.spec import ModelError
from moonpool.engine.tokenizer import TokenizerError

FOLDER = ROOT / "build" / "peer-tests"
RESULTS = ROOT / "benchmarks" / "results" / "peer-tests.json"


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
@click.option("--write", is_flag=True, help="Write benchmarks/results/peer-tests.json.")
def peer_tests(
    words: tuple[str, ...], names: tuple[str, ...], folder: Path, with_skipped: bool, write: bool
) -> None:
    """Run the server tests of vLLM and llama.cpp, only files with one of WORDS in their name.

    The exit status is 1 if a test failed, or if a skip names no test.
    """
    began = origin() | {"command": "python -m benchmarks.peer_tests --write"}
    folder = folder.absolute()
    found: dict[str, Any] = {}
    is_bad = False
    try:
        python = python_environment(_packages(), folder / "environment")
        model = write_model(python, folder)
        adapter = write_adapter(model, folder / "adapter")
        for name in names or SUITES:
            suite = read_suite(name)
            tests = unpacked(suite, folder)
            place = Place(python, tests, folder / "results", model, adapter)
            results, left_out = _run(suite, place, words, with_skipped)
            found[name] = {"title": suite.title} | figures(results, left_out)
            is_bad |= _tell(suite, results, left_out, is_whole=not words)
    except (ArchiveError, InstallError, SuiteError, ModelError, TokenizerError, OSError) as error:
        fail(str(error))
    if write:
        write_json(str(RESULTS), found | {"origin": began})
    raise SystemExit(is_bad)


def _packages() -> tuple[str, ...]:
    lines = (HERE / "packages.txt").read_text().splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


def _run(
    suite: Suite, place: Place, words: tuple[str, ...], with_skipped: bool
) -> tuple[list[FileResult], dict[str, str]]:
    """Returns the results of the files that were run, and the files that were not: why."""
    results: list[FileResult] = []
    left_out: dict[str, str] = {}
    for file in test_files(suite, place):
        skip = suite.skip(file)
        if words and not any(word in file for word in words):
            continue
        if skip is not None and not (with_skipped and words):
            left_out[file] = skip.reason
            continue
        results.append(run_file(suite, file, place, with_skipped))
        r = results[-1]
        number = sum(r.skipped.values())
        click.echo(f"{file}: {r.passed} passed, {len(r.failed)} failed, {number} skipped", err=True)
    return results, left_out


def _tell(
    suite: Suite, results: list[FileResult], left_out: dict[str, str], is_whole: bool
) -> bool:
    """Prints the table; returns whether something is to be mended."""
    click.echo(table(suite, results, left_out))
    endings = {test: ending for r in results for test, ending in r.endings.items()}
    for test, ending in endings.items():
        if ending == "passed" and suite.skip(test):
            click.echo(f"PASSED, though skipped: {test}")
    stale = suite.unmatched([*endings, *left_out]) if is_whole else []
    for pattern in stale:
        click.echo(f"NO TEST is named by the skip {pattern}")
    failed = any(r.failed for r in results)
    click.echo("")
    return failed or bool(stale)


if __name__ == "__main__":
    peer_tests(prog_name="python -m benchmarks.peer_tests")
