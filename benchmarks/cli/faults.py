"""`moonpool bench faults`: the table of docs/reliability.md."""

from __future__ import annotations

from typing import Annotated

import click

from benchmarks.cli.annotated import Seed, options
from benchmarks.cli.output import measure
from moonpool.cli.output import fail


@click.command()
@options
def faults(
    *,
    times: Annotated[int, "Inject each fault this often."] = 10,
    streams: Annotated[int, "Streams at the time."] = 4,
    only: Annotated[tuple[str, ...], "Only faults whose name has this text; writes no page."] = (),
    seed: Seed = 0,
) -> None:
    """Inject faults into real servers under streams, and write docs/reliability.md."""
    from benchmarks.reliability_page import PAGE, RESULTS, current
    from benchmarks.suite.live.faults import DAMAGED_DISK, bench_faults

    found = measure(
        lambda: {"faults": bench_faults(times, streams, seed, only)}, None if only else str(RESULTS)
    )
    for row in found["faults"]:
        seen = ", ".join(f"{count} {outcome}" for outcome, count in row["seen"].items())
        click.echo(f"{row['fault']}: {row['times']} times; {seen}; P50 {row['p50_s']} s")
    for row in found["faults"]:
        corrupt = row.get("corrupt_slices", 0)
        if corrupt and row["fault"] != DAMAGED_DISK:
            text = f"{row['fault']}: {corrupt} slices count as corrupt, and nothing was damaged"
            fail(text)
    if not only:
        PAGE.write_text(current())
        click.echo(f"wrote {PAGE}")
