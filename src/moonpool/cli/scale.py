"""What commands that take a trace share: its scale, its rows, and checks before long work."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import click

from moonpool.cli.output import fail
from moonpool.trace.row import TraceError, TraceInfo, TraceRow
from moonpool.trace.scale import parse_share, scale_trace


class _Share(click.ParamType[Fraction]):
    name = "share"

    def convert(
        self, value: str | Fraction, param: click.Parameter | None, ctx: click.Context | None
    ) -> Fraction:
        if isinstance(value, Fraction):
            return value
        try:
            return parse_share(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


SHARE = _Share()
scale_option = click.option(
    "--scale-tokens",
    "scale",
    type=SHARE,
    default="1",
    show_default=True,
    help="Share of each prompt and answer, such as 1/16.",
)


def tell_skipped(info: TraceInfo) -> None:
    """On stderr, if rows of the trace are no requests."""
    if info.skipped_rows:
        rows = f"{info.skipped_rows:,} of {info.num_rows + info.skipped_rows:,} rows"
        click.echo(f"left out: {rows}, which have no prompt or no answer", err=True)


def read_rows(
    trace_file: str, limit: int | None, scale: Fraction, speed: float = 1.0
) -> tuple[tuple[TraceRow, ...], int]:
    """And the tokens of their blocks. Ends the command where the trace cannot be read."""
    from moonpool.trace.reader import open_trace

    try:
        trace = scale_trace(open_trace(trace_file, limit=limit, speed=speed), scale)
        rows = tuple(trace)
    except TraceError as error:
        fail(str(error))
    tell_skipped(trace.info)
    return rows, trace.info.block_tokens


def check_folders(*paths: str | None) -> None:
    """Before the work, rather than after it."""
    for path in paths:
        if path is not None and not Path(path).parent.is_dir():
            fail(f"cannot write {path}: there is no folder {Path(path).parent}")
