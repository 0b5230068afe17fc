"""`moonpool bench kills`."""

from __future__ import annotations

from typing import Annotated

import click

from benchmarks.cli.annotated import Seed, options
from benchmarks.cli.output import measure
from moonpool.cli.options import json_option
from moonpool.cli.output import fail


@click.command()
@options
@json_option
def kills(
    *,
    kills: Annotated[int, "Processes to kill in each arrangement.", click.IntRange(min=0)] = 14,
    stops: Annotated[
        int, "Processes to stop (SIGSTOP) in each arrangement.", click.IntRange(min=0)
    ] = 7,
    streams: Annotated[int, "Streams at a time."] = 16,
    seconds: Annotated[float, "Most seconds in which faults come, for each arrangement."] = 300.0,
    stop_seconds: Annotated[
        float, "Longest time that a process stands still.", click.FloatRange(min=0.5)
    ] = 8.0,
    names: Annotated[
        tuple[str, ...],
        "Processes of the cluster; repeat for more. All of them unless given.",
        "--arrangement",
        click.Choice(["1M", "1P+1D", "2M", "2P+2D", "stages", "ranks", "attention"]),
    ] = (),
    only: Annotated[
        tuple[str, ...], "Kind of process to hit; repeat for more. All unless given.", "--kind"
    ] = (),
    seed: Seed = 0,
    json_file: str | None,
) -> None:
    """Kill and stop any process of a cluster at random under streams, and compare every answer."""
    from benchmarks.suite.live.kills.campaign import ARRANGEMENTS, bench_kills

    chosen = names or tuple(ARRANGEMENTS)
    found = measure(
        lambda: bench_kills(
            chosen, kills, stops, streams, seconds, stop_seconds, seed, only, click.echo
        ),
        json_file,
    )
    for one in found["arrangements"]:
        seen = ", ".join(f"{count} {outcome}" for outcome, count in one["answers"].items() if count)
        click.echo(f"{one['arrangement']}: {one['faults']} faults; {seen}")
        for trouble in one["troubles"]:
            click.echo(f"  {trouble}")
    if any(one["answers"]["wrong"] for one in found["arrangements"]):
        fail("answers differ from the undisturbed ones: see the lines above")
    damaged = [one["arrangement"] for one in found["arrangements"] if one["corrupt_slices"]]
    if damaged:
        fail(f"{', '.join(damaged)}: slices count as corrupt, although nothing was damaged")
