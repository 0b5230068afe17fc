"""Commands of `moonpool bench` about the roles and the number of instances."""

from __future__ import annotations

from typing import Annotated, Literal

import click

from benchmarks.cli.annotated import options
from benchmarks.cli.output import show
from moonpool.cli.options import json_option
from moonpool.cli.output import show_figures


@click.command(name="role-balance")
@options
@json_option
def role_balance(
    *,
    instances: Annotated[int, "Number of instances.", click.IntRange(3, 64)] = 6,
    window: Annotated[
        float,
        "Seconds of load that the role balance uses; the simulated day has two hours.",
        click.FloatRange(1.0, 86400.0),
    ] = 120.0,
    seeds: Annotated[
        tuple[int, ...], "Seed of the workload; repeat for more.", "--seed", click.INT
    ] = (0,),
    day: Annotated[
        Literal["shifting", "abrupt"],
        "How the mix shifts: over hours, or at once.",
        click.Choice(["shifting", "abrupt"]),
    ] = "shifting",
    json_file: str | None,
) -> None:
    """Simulate fixed splits of the instances and one that follows a day's mix. Takes minutes."""
    from benchmarks.suite.cluster.role_balance import bench_role_balance

    show(lambda: bench_role_balance(instances, window, seeds, click.echo, day), json_file)


@click.command(name="role-decisions")
@options
@json_option
def role_decisions(
    *,
    days: Annotated[int, "Number of days.", click.IntRange(1, 100000)] = 20,
    seed: Annotated[int, "Seed of the first day.", click.INT] = 0,
    phases: Annotated[int, "Phases of a day, each with another mix.", click.IntRange(2, 144)] = 6,
    phase_s: Annotated[float, "Seconds of a phase.", click.FloatRange(60.0, 86400.0)] = 600.0,
    json_file: str | None,
) -> None:
    """Decide when roles switch on days with abrupt shifts, without a cluster."""
    from benchmarks.suite.cluster.role_decisions import decided_days

    seeds = range(seed, seed + days)
    show_figures(decided_days(seeds, phases, phase_s, lambda _: None), json_file)


@click.command(name="autoscale")
@options
@json_option
def autoscale(
    *,
    boot_s: Annotated[
        float,
        "Seconds until an instance that is started can serve.",
        click.FloatRange(0.0, 86400.0),
    ] = 120.0,
    day_s: Annotated[
        float, "Seconds of the simulated day.", click.FloatRange(60.0, 86400.0)
    ] = 7_200.0,
    seed: Annotated[int, "Seed of the workload.", click.INT] = 0,
    json_file: str | None,
) -> None:
    """Simulate a day on fixed numbers of instances and with autoscale. Takes minutes."""
    from benchmarks.suite.cluster.autoscale import bench_autoscale

    show_figures(bench_autoscale(boot_s, day_s, seed, click.echo), json_file)
