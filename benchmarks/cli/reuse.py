"""Benchmarks of predicted reuse: eviction policies, and prefetching from the SSD."""

from __future__ import annotations

import click

from moonpool.cli.options import COUNT, json_option
from moonpool.cli.output import fail, show_figures


@click.command()
@click.option(
    "--trace",
    "traces",
    multiple=True,
    help="Trace file with block hashes to compare on, too; repeat for more.",
)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    help="Generated workload, by the name of its profile; five kinds unless given.",
)
@click.option(
    "--seed",
    "seeds",
    type=int,
    multiple=True,
    default=(1, 2, 3),
    show_default=True,
    help="Seed of the generated workloads; repeat for more.",
)
@click.option(
    "--share",
    "shares",
    type=COUNT,
    multiple=True,
    default=(4, 16),
    show_default=True,
    help="Cache of one in this many of the workload's blocks; repeat for more.",
)
@click.option(
    "--hours",
    type=click.FloatRange(min=0.01),
    default=1.0,
    show_default=True,
    help="Length of a generated workload.",
)
@json_option
def reuse(
    traces: tuple[str, ...],
    workloads: tuple[str, ...],
    seeds: tuple[int, ...],
    shares: tuple[int, ...],
    hours: float,
    json_file: str | None,
) -> None:
    """Compare eviction policies: what share of an unlimited cache's hits a small one keeps."""
    from benchmarks.suite.pool.reuse import KNOWN, WORKLOADS, bench_reuse
    from moonpool.trace.row import TraceError

    unknown = [name for name in workloads if name not in KNOWN]
    if unknown:
        fail(f"there is no workload {unknown[0]!r}; use {', '.join(KNOWN)}")
    try:
        found = bench_reuse(traces, workloads or WORKLOADS, seeds, shares, hours, click.echo)
    except TraceError as error:
        fail(str(error))
    show_figures(found, json_file)


@click.command()
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    help="Generated workload, by the name of its profile; three kinds of sessions unless given.",
)
@click.option("--requests", type=COUNT, default=2000, show_default=True, help="Number of requests.")
@click.option(
    "--rate",
    type=click.FloatRange(min=0.01),
    default=1.2,
    show_default=True,
    help="Requests per second.",
)
@click.option(
    "--kv-tokens",
    type=COUNT,
    default=700_000,
    show_default=True,
    help="Tokens of KVCache in DRAM per instance.",
)
@json_option
def prefetch(
    workloads: tuple[str, ...], requests: int, rate: float, kv_tokens: int, json_file: str | None
) -> None:
    """Simulate sessions without and with prefetching from the SSD."""
    from benchmarks.suite.pool.prefetch import WORKLOADS, bench_prefetch
    from moonpool.trace.builtin import BUILT_IN
    from moonpool.trace.row import TraceError

    unknown = [name for name in workloads if name not in BUILT_IN]
    if unknown:
        fail(f"there is no workload {unknown[0]!r}; use {', '.join(BUILT_IN)}")
    try:
        found = bench_prefetch(workloads or WORKLOADS, requests, rate, kv_tokens, click.echo)
    except TraceError as error:
        fail(str(error))
    show_figures(found, json_file)
