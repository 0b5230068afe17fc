"""`moonpool bench kills`."""

from __future__ import annotations

import click

from moonpool.cli.options import COUNT, POSITIVE, json_option
from moonpool.cli.output import fail, run_measurement


@click.command()
@click.option(
    "--kills",
    type=click.IntRange(min=0),
    default=14,
    show_default=True,
    help="Processes to kill in each arrangement.",
)
@click.option(
    "--stops",
    type=click.IntRange(min=0),
    default=7,
    show_default=True,
    help="Processes to stop (SIGSTOP) in each arrangement.",
)
@click.option("--streams", type=COUNT, default=16, show_default=True, help="Streams at a time.")
@click.option(
    "--seconds",
    type=POSITIVE,
    default=300.0,
    show_default=True,
    help="Most seconds in which faults come, for each arrangement.",
)
@click.option(
    "--stop-seconds",
    type=click.FloatRange(min=0.5),
    default=8.0,
    show_default=True,
    help="Longest time that a process stands still.",
)
@click.option(
    "--arrangement",
    "names",
    multiple=True,
    type=click.Choice(["1M", "1P+1D", "2M", "2P+2D", "stages", "ranks", "attention"]),
    help="Processes of the cluster; repeat for more. All of them unless given.",
)
@click.option(
    "--kind",
    "only",
    multiple=True,
    help="Kind of process to hit; repeat for more. All unless given.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all random choices.")
@json_option
def kills(
    kills: int,
    stops: int,
    streams: int,
    seconds: float,
    stop_seconds: float,
    names: tuple[str, ...],
    only: tuple[str, ...],
    seed: int,
    json_file: str | None,
) -> None:
    """Kill and stop any process of a cluster at random under streams, and compare every answer."""
    from benchmarks.suite.live.kills.calls import ResponseError
    from benchmarks.suite.live.kills.campaign import ARRANGEMENTS, KillsError, bench_kills

    chosen = names or tuple(ARRANGEMENTS)
    try:
        found = run_measurement(
            lambda: bench_kills(
                chosen, kills, stops, streams, seconds, stop_seconds, seed, only, click.echo
            ),
            json_file,
        )
    except (KillsError, ResponseError) as error:
        fail(str(error))
    for one in found["arrangements"]:
        seen = ", ".join(f"{count} {outcome}" for outcome, count in one["answers"].items() if count)
        click.echo(f"{one['arrangement']}: {one['faults']} faults; {seen}")
        for trouble in one["troubles"]:
            click.echo(f"  {trouble}")
    if any(one["answers"]["wrong"] for one in found["arrangements"]):
        fail("answers differ from the undisturbed ones: see the lines above")
