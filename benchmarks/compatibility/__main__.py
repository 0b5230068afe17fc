"""Runs the tests against the installations that are named, and writes the page."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from benchmarks.compatibility.counterparts import BY_NAME, COUNTERPARTS, Counterpart
from benchmarks.compatibility.page import PAGE, RESULTS, current
from benchmarks.compatibility.running import (
    MODEL_VARIABLE,
    PlaceError,
    run_part,
    versions_of,
)
from moonpool.cli.output import fail, one_line, origin, write_json

ORIGIN = {
    "command": "python -m benchmarks.compatibility",
    "commit": "that of each run",
    "machine": "that of each run",
}


@click.command()
@click.argument("named", nargs=-1, metavar="[NAME[=WHERE]]...")
@click.option(
    "--model",
    type=click.Path(exists=True, path_type=Path),
    help="Folder of a model that vLLM can serve; what needs one is left out without it.",
)
@click.option("--part", "words", multiple=True, help="Run only parts with this in their title.")
@click.option("--remark", default="", help="What is unusual about the installation.")
@click.option("--page", "page_only", is_flag=True, help="Write the page, and run nothing.")
def compatibility(
    named: tuple[str, ...],
    model: Path | None,
    words: tuple[str, ...],
    remark: str,
    page_only: bool,
) -> None:
    """Run the tests against other programs, with the installations that are named.

    The exit status is 1 if a test failed.
    """
    is_bad = False
    for word in () if page_only else named:
        for run in _runs(*_counterpart(word), model, words, remark):
            is_bad |= any(ended["failed"] for ended in run["parts"].values())
            known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {"runs": []}
            write_json(str(RESULTS), {"runs": merged(known["runs"], run), "origin": ORIGIN})
            PAGE.write_text(current())
    if page_only:
        PAGE.write_text(current())
    elif not named:
        fail(f"name one of {', '.join(BY_NAME)}, as NAME=WHERE")
    raise SystemExit(is_bad)


def _counterpart(word: str) -> tuple[Counterpart, str]:
    """Returns the counterpart and its place."""
    name, _, place = word.partition("=")
    if name not in BY_NAME:
        fail(f"{name!r} is none of {', '.join(each.name for each in COUNTERPARTS)}")
    found = BY_NAME[name]
    if not place and found.place != "environment":
        fail(f"name the {found.place} of {name}: {name}=WHERE")
    return found, place or sys.executable


def _runs(
    counterpart: Counterpart, place: str, model: Path | None, words: tuple[str, ...], remark: str
) -> Iterator[dict[str, Any]]:
    """Yields one run for each part, as soon as the part has ended."""
    with one_line(PlaceError):
        versions = versions_of(counterpart, place)
    click.echo(f"{counterpart.title}: {versions}", err=True)
    more = {MODEL_VARIABLE: str(model.absolute())} if model is not None else {}
    about = {"counterpart": counterpart.name, "versions": versions, "remark": remark}
    began = origin()
    for part in counterpart.parts:
        if words and not any(word in part.title for word in words):
            continue
        if part.needs_model and model is None:
            click.echo(f"{part.title}: left out, it needs --model", err=True)
            continue
        ended = run_part(counterpart, part, place, more)
        counts = (ended["passed"], len(ended["failed"]), sum(ended["skipped"].values()))
        click.echo("{}: {} passed, {} failed, {} skipped".format(part.title, *counts), err=True)
        where = {key: began[key] for key in ("commit", "machine")}
        yield about | {"parts": {part.title: ended | where}}


def merged(known: list[dict[str, Any]], new: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the runs with the parts of the new run in place of those of the same version."""
    runs = []
    for run in known:
        if (run["counterpart"], run["versions"]) == (new["counterpart"], new["versions"]):
            new = new | {
                "parts": run["parts"] | new["parts"],
                "remark": new["remark"] or run["remark"],
            }
        else:
            runs.append(run)
    order = [each.name for each in COUNTERPARTS]
    return sorted([*runs, new], key=lambda run: (order.index(run["counterpart"]), _key(run)))


def _key(run: dict[str, Any]) -> str:
    return json.dumps(run["versions"])


if __name__ == "__main__":
    compatibility(prog_name="python -m benchmarks.compatibility")
