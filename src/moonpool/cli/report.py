"""`moonpool report`: a page that compares several runs."""

from __future__ import annotations

from pathlib import Path

import click

from moonpool.cli.output import check_folders, one_line


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(), metavar="FILE...")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    required=True,
    help="Write the HTML page to this file.",
)
@click.option(
    "--name",
    "names",
    multiple=True,
    help="Heading of a run, once for each file in order; their names unless given.",
)
def report(files: tuple[str, ...], output: str, names: tuple[str, ...]) -> None:
    """Show several runs beside each other on one page.

    The files are those that `simulate --json` and `replay --json` write. The first run is the one
    that the others are compared with. The page says where the runs had different inputs.
    """
    from moonpool.studies.calls import report as write_report

    check_folders(output)
    with one_line(ValueError, OSError):
        write_report([Path(file) for file in files], output, list(names) or None)
    click.echo(f"report: {output}")
