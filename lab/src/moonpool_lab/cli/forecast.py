"""`moonpool forecast`: predicts what a server will do under a trace, and then measures it."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import click

from moonpool.cli.help_screen import ScreenHelp
from moonpool.cli.inputs import read_rows
from moonpool.cli.options import (
    POSITIVE,
    json_option,
    requests_option,
    scale_option,
    trace_format_option,
    trace_option,
)
from moonpool.cli.output import check_folders, origin, write_json
from moonpool.cli.server.address import KEYS_FOR_ANYBODY, Server, asks_server
from moonpool_lab.cli.prompt_options import prompt_options

LOADS = (0.5, 0.8, 1.0, 1.5)


@click.command(
    cls=ScreenHelp,
    screen=(
        "--trace",
        "--table",
        "--title",
        "--measure-s",
        "--run-s",
        "--load",
        "--requests",
        "--slo-ttft",
        "--slo-tbt",
        "--json",
    ),
)
@trace_option
@trace_format_option
@asks_server(keys=KEYS_FOR_ANYBODY)
@click.option(
    "--table",
    "table_file",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("forecasts.jsonl"),
    show_default=True,
    help="Add the forecast and its outcome to this file, which is only added to.",
)
@click.option("--title", default="", help="Name of the row; model and trace unless given.")
@click.option(
    "--measure-s",
    type=POSITIVE,
    default=60.0,
    show_default=True,
    help="Seconds for which single requests measure the server.",
)
@click.option(
    "--run-s",
    type=POSITIVE,
    default=60.0,
    show_default=True,
    help="Seconds of the trace that each load replays.",
)
@click.option(
    "--load",
    "loads",
    type=POSITIVE,
    multiple=True,
    default=LOADS,
    show_default=True,
    help="Share of the predicted capacity to forecast and try; repeat for more.",
)
@requests_option
@scale_option
@prompt_options
@click.option(
    "--slo-ttft",
    "slo_ttft_s",
    type=POSITIVE,
    help="Service level of the time to first token, in s.",
)
@click.option(
    "--slo-tbt", "slo_tbt_s", type=POSITIVE, help="Service level of the time between tokens, in s."
)
@click.option(
    "--timeout",
    "timeout_s",
    type=POSITIVE,
    default=600.0,
    show_default=True,
    help="Most seconds for one answer.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of the tokens of the prompts."
)
@json_option
def forecast(
    trace_file: str,
    trace_format: str,
    server: Server,
    table_file: Path,
    loads: tuple[float, ...],
    requests: int | None,
    scale: Fraction,
    prompts: str,
    json_file: str | None,
    **given: Any,
) -> None:
    """Forecast how a server will answer a trace, store the forecast, and then replay the trace.

    Measures any OpenAI-compatible server through its front door, fits a profile, and simulates the
    trace at shares of the capacity that it predicts. The forecast of TTFT, TBT, cache hits and
    requests within their SLOs is in the table before the first load is replayed. If neither the
    server nor flags state SLOs, they are 10 times the P90 of TTFT and 5 times the P90 of TBT
    without load.
    """
    from moonpool.studies.trace_rows import TraceRows, named_trace
    from moonpool_lab.cli.client_run import run_client
    from moonpool_lab.forecast.run import ForecastPlan, run_forecast

    check_folders(json_file, str(table_file))
    rows, block_tokens = read_rows(trace_file, requests, scale, trace_format=trace_format)
    plan = ForecastPlan(
        url=server.url,
        trace=TraceRows(rows, block_tokens, Path(trace_file).name),
        table=table_file,
        loads=tuple(sorted(loads)),
        as_text=prompts == "text",
        api_key=server.api_key,
        ca_file=server.ca_file,
        origin=origin(),
        trace_named=named_trace(trace_file) | {"scale_tokens": str(scale)},
        **given,
    )
    found = run_client(run_forecast(plan, lambda line: click.echo(line, err=True)))
    write_json(json_file, found)
    for line in outcome_lines(found):
        click.echo(line)


def outcome_lines(found: dict[str, Any]) -> list[str]:
    """Returns a table of the forecast and the measured figures."""
    made = found["forecast"]
    slo = made["slo"]
    title = (
        f"{made['title']}: capacity {made['capacity_rps']:.3g} requests a second within TTFT"
        f" {slo['ttft_s']:.3g} s and TBT {slo['tbt_s']:.3g} s"
    )
    header = (
        f"{'load':>5} {'':<9} {'TTFT p50':>9} {'p90':>8} {'p99':>8} {'TBT p50':>9} {'p90':>8}"
        f" {'p99':>8} {'hits':>6} {'effective':>12}"
    )
    lines = [title, header]
    for expected, came in zip(made["loads"], found["outcomes"], strict=True):
        for name, figures in (("forecast", expected["figures"]), ("came", came["figures"])):
            ttft, tbt = figures["ttft_s"].values(), figures["tbt_s"].values()
            lines.append(
                f"{expected['load']:>5g} {name:<9} {_cells(ttft)} {_cells(tbt)}"
                f" {figures['hit_ratio']:>6.1%} {figures['effective']:>5} of {figures['requests']}"
            )
    return lines


def _cells(values: Any) -> str:
    first, *others = (f"{value:.3g}" for value in values)
    return f"{first:>9} {' '.join(f'{each:>8}' for each in others)}"
