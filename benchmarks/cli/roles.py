"""Commands of `moonpool bench` about the roles and the number of instances."""

from __future__ import annotations

from typing import Literal

import click

from moonpool.cli.options import json_option
from moonpool.cli.output import fail, show_figures


@click.command(name="role-balance")
@click.option(
    "--instances",
    type=click.IntRange(3, 64),
    default=6,
    show_default=True,
    help="Number of instances.",
)
@click.option(
    "--window",
    type=click.FloatRange(1.0, 86_400.0),
    default=120.0,
    show_default=True,
    help="Seconds of load that the role balance uses; the simulated day has two hours.",
)
@click.option(
    "--seed",
    "seeds",
    type=int,
    multiple=True,
    default=(0,),
    show_default=True,
    help="Seed of the workload; repeat for more.",
)
@click.option(
    "--day",
    type=click.Choice(["shifting", "abrupt"]),
    default="shifting",
    show_default=True,
    help="How the mix shifts: over hours, or at once.",
)
@json_option
def role_balance(
    instances: int,
    window: float,
    seeds: tuple[int, ...],
    day: Literal["shifting", "abrupt"],
    json_file: str | None,
) -> None:
    """Simulate fixed splits of the instances and one that follows a day's mix. Takes minutes."""
    from benchmarks.suite.cluster.role_balance import RoleBalanceBenchError, bench_role_balance

    try:
        found = bench_role_balance(instances, window, seeds, click.echo, day)
    except RoleBalanceBenchError as error:
        fail(str(error))
    show_figures(found, json_file)


@click.command(name="role-decisions")
@click.option(
    "--days", type=click.IntRange(1, 100_000), default=20, show_default=True, help="Number of days."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the first day.")
@click.option(
    "--phases",
    type=click.IntRange(2, 144),
    default=6,
    show_default=True,
    help="Phases of a day, each with another mix.",
)
@click.option(
    "--phase-s",
    type=click.FloatRange(60.0, 86_400.0),
    default=600.0,
    show_default=True,
    help="Seconds of a phase.",
)
@json_option
def role_decisions(
    days: int, seed: int, phases: int, phase_s: float, json_file: str | None
) -> None:
    """Decide when roles switch on days with abrupt shifts, without a cluster."""
    from benchmarks.suite.cluster.role_decisions import decided_days

    seeds = range(seed, seed + days)
    show_figures(decided_days(seeds, phases, phase_s, lambda _: None), json_file)


@click.command(name="autoscale")
@click.option(
    "--boot-s",
    type=click.FloatRange(0.0, 86_400.0),
    default=120.0,
    show_default=True,
    help="Seconds until an instance that is started can serve.",
)
@click.option(
    "--day-s",
    type=click.FloatRange(60.0, 86_400.0),
    default=7_200.0,
    show_default=True,
    help="Seconds of the simulated day.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the workload.")
@json_option
def autoscale(boot_s: float, day_s: float, seed: int, json_file: str | None) -> None:
    """Simulate a day on fixed numbers of instances and with autoscale. Takes minutes."""
    from benchmarks.suite.cluster.autoscale import bench_autoscale

    show_figures(bench_autoscale(boot_s, day_s, seed, click.echo), json_file)
