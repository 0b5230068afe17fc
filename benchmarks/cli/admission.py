"""`bench admission` and `admission-workloads`: effective requests of every admission policy."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import click

from benchmarks.cli.annotated import Seed, options
from moonpool.cli.options import json_option
from moonpool.cli.output import check_folders, one_line, origin, write_json
from moonpool.config.tables import ADMISSIONS


@click.command()
@options
@json_option
def admission(
    *,
    traces: Annotated[
        tuple[str, ...],
        "A recorded trace, beside the generated workloads; repeat for more.",
        "--trace",
        click.Path(exists=True, dir_okay=False),
    ] = (),
    requests: Annotated[int, "Requests of each workload."] = 1200,
    runs: Annotated[int, "Simulations of the search for the best schedule, at most."] = 30,
    processes: Annotated[int, "Simulations at a time."] = 2,
    traces_only: Annotated[bool, "Leave the generated workloads out."] = False,
    json_file: str | None,
) -> None:
    """Simulate all admission policies on several workloads, clusters and loads.

    Each policy runs with the wait for a decode batch and without it. Each figure is the number of
    requests that meet both SLOs. The bound is a number that no schedule exceeds. The next figure is
    the best schedule that a search finds when it knows the future.
    """
    from benchmarks.suite.cluster.admission import GENERATED, compare_admissions, recorded

    cases = [*map(recorded, traces), *(() if traces_only else GENERATED)]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, one_line(RuntimeError):
        for row in compare_admissions(cases, requests, runs, Path(folder), processes):
            _print(row, first=not rows)
            rows.append(row)
    write_json(json_file, {"rows": rows, "origin": origin()})


def _print(row: dict[str, Any], first: bool) -> None:
    policies = row["effective"]
    if first:
        names = "".join(f" {name:>10s}" for name in policies)
        click.echo(f"{'':52s} {'bound':>6s} {'found':>6s}{names}")
    name = f"{row['workload']}, {row['speed']:g} x speed"
    figures = "".join(f" {count:{max(len(n), 10)},d}" for n, count in policies.items())
    click.echo(f"{name:52s} {row['bound']:6,d} {row['best_schedule']:6,d}{figures}")


@click.command("admission-workloads")
@options
@json_option
def admission_workloads(
    *,
    traces: Annotated[
        tuple[str, ...],
        "A recorded trace, of which every third workload is a part; repeat for more.",
        "--trace",
        click.Path(exists=True, dir_okay=False),
    ] = (),
    draws: Annotated[int, "Number of workloads."] = 20,
    seed: Seed = 0,
    requests: Annotated[int, "Requests of each workload."] = 700,
    processes: Annotated[int, "Simulations at a time."] = 2,
    folder: Annotated[
        str | None,
        "Keep each workload's trace in this folder, for `moonpool simulate`.",
        "--keep",
        click.Path(exists=True, file_okay=False),
    ] = None,
    json_file: str | None,
) -> None:
    """Simulate all admission policies on workloads that chance draws.

    A workload is a kind of requests, a cluster, SLOs, a pattern of arrivals and a load from 0.3 to
    4 times the capacity. Each figure is the number of requests within both SLOs, with the wait for
    a decode batch; the last line has the sums without that wait.
    """
    from benchmarks.suite.cluster.admission_workloads import (
        AdmissionDraw,
        compare_on_draws,
        summarise,
    )
    from moonpool.config.tables import ConfigError
    from moonpool.trace.row import TraceError

    check_folders(json_file)
    chosen = [AdmissionDraw(seed, number, requests, traces, folder) for number in range(draws)]
    rows: list[dict[str, Any]] = []
    with one_line(ConfigError, TraceError):
        for row in compare_on_draws(chosen, processes):
            _print_draw(row, first=not rows)
            rows.append(row)
    summary = summarise(rows)
    _print_summary(summary)
    write_json(json_file, {"summary": summary, "rows": rows, "origin": origin()})


def _print_draw(row: dict[str, Any], first: bool) -> None:
    from benchmarks.suite.cluster.admission_workloads import LOST, loss

    policies = {name: row["effective"][name] for name in ADMISSIONS}
    if first:
        names = "".join(f" {name:>10s}" for name in policies)
        click.echo(f"{'':3s} {'workload, cluster, SLOs, arrivals, load':76s}{names} {'lost':>7s}")
    what = (
        f"{row['workload']}, {row['cluster']}, {row['slo_ttft_s']:g} s, {row['slo_tbt_s']:g} s,"
        f" {row['arrivals']}, {row['load']:g}"
    )
    figures = "".join(f" {count:10,d}" for count in policies.values())
    lost = loss(policies)
    mark = f" {lost:7.1%}" if lost > LOST else ""
    click.echo(f"{row['number']:3d} {what:76s}{figures}{mark}")


def _print_summary(summary: dict[str, Any]) -> None:
    from moonpool_lab.oracle.search import WITHOUT_WAIT

    for what, mark in (("sum", ""), ("sum without the wait", WITHOUT_WAIT)):
        sums = "".join(f" {summary['sum'][name + mark]:10,d}" for name in ADMISSIONS)
        click.echo(f"{'':3s} {what:76s}{sums}")
    click.echo(
        f"goodput serves over 1 % less than the best other policy in {summary['lost_rows']} of"
        f" {summary['rows']} rows, at worst {summary['worst_loss']:.1%} less. The best others have"
        f" {summary['sum_of_best_others']:,} in sum."
    )
