"""`bench admission`: effective requests of every admission policy, beside the oracle's bound."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import click

from benchmarks.cli.annotated import options
from moonpool.cli.options import json_option
from moonpool.cli.output import fail, origin, write_json


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
    processes: Annotated[int, "Simulations at a time."] = 2,
    json_file: str | None,
) -> None:
    """Simulate all admission policies on several workloads, clusters and loads.

    Each figure is the number of requests within both SLOs. The bound is what no schedule exceeds.
    """
    from benchmarks.suite.cluster.admission import GENERATED, compare_admissions, recorded

    cases = [*(recorded(trace) for trace in traces), *GENERATED]
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for row in compare_admissions(cases, requests, Path(folder), processes):
                _print(row, first=not rows)
                rows.append(row)
        except RuntimeError as error:
            fail(str(error))
    write_json(json_file, {"rows": rows, "origin": origin()})


def _print(row: dict[str, Any], first: bool) -> None:
    policies = row["effective"]
    if first:
        click.echo(f"{'':52s} {'bound':>6s}" + "".join(f" {name:>10s}" for name in policies))
    name = f"{row['workload']}, {row['speed']:g} x speed"
    figures = "".join(f" {count:10,d}" for count in policies.values())
    click.echo(f"{name:52s} {row['bound']:6,d}{figures}")
