"""Benchmark of programs (agents): their makespans, by program rules and by call-level policies."""

from __future__ import annotations

from typing import Annotated

import click

from benchmarks.cli.annotated import options
from benchmarks.cli.output import show
from moonpool.cli.options import COUNT, json_option


@click.command()
@options
@json_option
def programs(
    *,
    workload: Annotated[
        str, "Generated programs.", click.Choice(["tool-programs", "agents", "coding-agents"])
    ] = "tool-programs",
    instances: Annotated[int, "Mixed instances of the simulated cluster.", COUNT] = 16,
    loads: Annotated[
        tuple[float, ...], "Load; repeat for more.", "--load", click.FloatRange(min=0.01)
    ] = (0.8, 1.0, 1.2),
    number: Annotated[int, "Programs of a run.", "--programs", COUNT] = 400,
    kv_tokens: Annotated[int, "Tokens of KVCache in memory per instance.", COUNT] = 200_000,
    capacity_rps: Annotated[
        float, "Calls per second of one instance at load 1.", click.FloatRange(min=0.001)
    ] = 0.7,
    policies: Annotated[
        tuple[str, ...],
        "Policy; repeat for more.",
        "--policy",
        click.Choice(["calls, goodput", "calls, none", "programs"]),
    ] = ("calls, goodput", "calls, none", "programs"),
    json_file: str | None,
) -> None:
    """Simulate agents in a closed loop by program rules and by call-level policies."""
    from benchmarks.suite.cluster.programs import bench_programs

    show(
        lambda: bench_programs(
            workload, instances, loads, number, kv_tokens, capacity_rps, policies, click.echo
        ),
        json_file,
    )
