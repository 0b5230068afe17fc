"""`moonpool reproduce NAME`: a table or figure of a paper beside ours, with the difference."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from moonpool.cli.output import fail, write_json
from papers.finding import Check, Finding, FindingRow, Verdict, figures
from papers.options import TRACE_FOLDER, ExperimentError, MissingTraceError, Options
from papers.registry import EXPERIMENTS, find, run

MIN_COLUMNS = 120  # width of the tables in a file, which has no terminal's width
COLOUR: dict[Verdict, str] = {
    "within 10 %": "green",
    "within 25 %": "green",
    "same order": "yellow",
    "does not follow": "red",
    "ours alone": "dim",
    "withheld": "dim",
}
FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)


@click.command()
@click.argument("name", required=False)
@click.option("--list", "listed", is_flag=True, help="List all experiments and end.")
@click.option("--trace", type=FILE, help="Use this trace for every experiment.")
@click.option("--plot", type=FOLDER, help="Draw each finding as a PNG in this folder.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False), help="Write all figures to this file."
)
@click.option("--seed", default=0, show_default=True, help="Seed of all random choices.")
@click.option(
    "--quick",
    is_flag=True,
    help="Use fewer requests, for a first look; the figures are not to be quoted.",
)
def reproduce(
    name: str | None,
    listed: bool,
    trace: Path | None,
    plot: Path | None,
    json_file: str | None,
    seed: int,
    quick: bool,
) -> None:
    """Print a table or figure of a paper next to ours, with the difference.

    NAME is one of --list, or `all`. Traces are looked for in the folder MOONPOOL_TRACES, in
    ./traces and here.
    """
    console = Console(highlight=False, width=max(Console().width, MIN_COLUMNS))
    if listed:
        _print_list(console)
        return
    if name is None:
        fail("name an experiment of `moonpool reproduce --list`, or `all`")
    options = Options(seed, quick, trace, _trace_folders())
    try:
        names = list(EXPERIMENTS) if name == "all" else [name]
        for each in names:
            find(each)
        found, missing = _run_all(console, names, options, plot)
    except ExperimentError as error:
        fail(str(error))
    except OSError as error:
        fail(f"cannot write to {plot}: {error.strerror}")
    write_json(json_file, {"seed": seed, "quick": quick, "findings": found})
    if missing:
        fail("; ".join(missing))


def _trace_folders() -> tuple[Path, ...]:
    named = os.environ.get("MOONPOOL_TRACES")
    return (*((Path(named),) if named else ()), Path(TRACE_FOLDER), Path())


def _run_all(
    console: Console, names: list[str], options: Options, plot: Path | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the figures of the experiments that ran, and what the others lack. If only one was
    asked for and its trace is missing, raises MissingTraceError."""
    found: list[dict[str, Any]] = []
    missing: list[str] = []
    screen = Console(stderr=True)
    for name in names:
        began_s = time.perf_counter()
        try:
            with screen.status(name) as status:
                told = Options(
                    options.seed,
                    options.quick,
                    options.trace,
                    options.folders,
                    lambda text, name=name: status.update(f"{name}: {text}"),  # type: ignore[misc]
                )
                finding = run(name, told)
        except MissingTraceError as error:
            if len(names) == 1:
                raise
            missing.append(f"{name} was left out: {error}")
            continue
        _print(console, finding)
        console.print(f"[dim]{time.perf_counter() - began_s:.1f} s, seed {options.seed}[/]")
        if plot is not None:
            console.print(f"drawn as {_draw(finding, plot)}", markup=False)
        found.append(figures(finding))
    return found, missing


def _draw(finding: Finding, folder: Path) -> Path | None:
    from papers.draw import draw

    return draw(finding, folder)


def _print_list(console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("name", "what", "of", "needs the trace"):
        table.add_column(heading)
    for name, each in EXPERIMENTS.items():
        table.add_row(name, each.title, each.source, each.trace or "-")
    console.print(table)


def _print(console: Console, finding: Finding) -> None:
    console.rule(f"{finding.name}: {finding.title}")
    console.print(finding.source, markup=False)
    for heading, lines in (
        ("The paper's inputs", finding.paper_inputs),
        ("Chosen here", finding.chosen_inputs),
    ):
        if lines:
            console.print(f"[bold]{heading}[/]")
            for line in lines:
                console.print(f"  - {line}", markup=False)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("figure", "unit", "paper", "ours", "difference", "verdict", "why"):
        number = heading in ("paper", "ours", "difference")
        table.add_column(heading, justify="right" if number else "left", no_wrap=number)
    for row in finding.rows:
        verdict = f"[{COLOUR[row.verdict]}]{row.verdict}[/]"
        table.add_row(
            row.label, row.unit, _figure(row.paper), _figure(row.ours), _off(row), verdict, row.note
        )
    console.print(table)
    for check in finding.checks:
        console.print(f"{_mark(check)}  {check.text}")
    for note in finding.notes:
        console.print(f"Note: {note}", markup=False)


def _mark(check: Check) -> str:
    if check.partial:
        return "[dim]withheld[/]"
    return "[green]holds[/]" if check.holds else "[red]FAILS[/]"


def _figure(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _off(row: FindingRow) -> str:
    if row.difference is None:
        return "-"
    if abs(row.difference) >= 10:
        return f"x {row.difference + 1:.3g}"
    return f"{100 * row.difference:+.1f} %"
