"""Reads the files that commands take: text, traces, the hardware catalogue and profiles."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

import click

from moonpool.cli.output import one_line
from moonpool.config.tables import Config, ConfigError
from moonpool.studies.hardware_files import read_catalogue_and_profile, read_text_file
from moonpool.trace.row import TraceError, TraceInfo, TraceRow

if TYPE_CHECKING:
    from moonpool.cost.fitted import FittedCost
    from moonpool.sim.hardware.catalogue import Catalogue


def read_text(path: str, what: str) -> str:
    """Returns a text file's content; `what` names it in the error that ends the command."""
    with one_line(ConfigError):
        return read_text_file(path, what)


def read_rows(
    trace_file: str,
    limit: int | None,
    scale: Fraction,
    speed: float = 1.0,
    trace_format: str = "auto",
) -> tuple[tuple[TraceRow, ...], int]:
    """Returns the trace's scaled rows and the tokens of their blocks.

    Ends the command where the trace cannot be read.
    """
    from moonpool.studies.trace_rows import open_scaled

    with one_line(TraceError):
        trace = open_scaled(trace_file, limit, speed, scale, trace_format)
        rows = tuple(trace)
    report_skipped(trace.info)
    return rows, trace.info.block_tokens


def report_skipped(info: TraceInfo) -> None:
    """Prints on stderr how many lines and rows of a trace are left out, if any are."""
    if info.other_lines:
        click.echo(f"left out: {info.other_lines:,} lines, which are no requests", err=True)
    if info.skipped_rows:
        rows = f"{info.skipped_rows:,} of {info.num_rows + info.skipped_rows:,} rows"
        click.echo(f"left out: {rows}, which have no prompt or no answer", err=True)


def open_catalogue_and_profile(
    config: Config, catalogue_file: str | None
) -> tuple[Catalogue, FittedCost | None]:
    """Opens the catalogue of hardware, and the profile if `hardware.cost` names one.

    Ends the command if either cannot be read.
    """
    with one_line(ConfigError):
        return read_catalogue_and_profile(config, catalogue_file)
