"""`moonpool bench faults`: the table of docs/reliability.md."""

from __future__ import annotations

import click

from moonpool.cli.options import COUNT
from moonpool.cli.output import run_measurement


@click.command()
@click.option(
    "--times", type=COUNT, default=10, show_default=True, help="Inject each fault this often."
)
@click.option("--streams", type=COUNT, default=4, show_default=True, help="Streams at the time.")
@click.option("--only", multiple=True, help="Only faults whose name has this text; writes no page.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all random choices.")
def faults(times: int, streams: int, only: tuple[str, ...], seed: int) -> None:
    """Inject faults into real servers under streams, and write docs/reliability.md."""
    from benchmarks.reliability_page import PAGE, RESULTS, current
    from benchmarks.suite.live.faults import bench_faults

    found = run_measurement(
        lambda: {"faults": bench_faults(times, streams, seed, only)},
        None if only else str(RESULTS),
    )
    for row in found["faults"]:
        seen = ", ".join(f"{count} {outcome}" for outcome, count in row["seen"].items())
        click.echo(f"{row['fault']}: {row['times']} times; {seen}; P50 {row['p50_s']} s")
    if not only:
        PAGE.write_text(current())
        click.echo(f"wrote {PAGE}")
