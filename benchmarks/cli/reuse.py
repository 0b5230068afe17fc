"""Benchmarks of predicted reuse: eviction policies, and prefetching from the SSD."""

from __future__ import annotations

from typing import Annotated

import click

from benchmarks.cli.annotated import options
from benchmarks.cli.output import show
from moonpool.cli.options import json_option
from moonpool.cli.output import fail


@click.command()
@options
@json_option
def reuse(
    *,
    traces: Annotated[
        tuple[str, ...],
        "Trace file with block hashes to compare on, too; repeat for more.",
        "--trace",
    ] = (),
    workloads: Annotated[
        tuple[str, ...],
        "Generated workload, by the name of its profile; five kinds unless given.",
        "--workload",
    ] = (),
    seeds: Annotated[
        tuple[int, ...], "Seed of the generated workloads; repeat for more.", "--seed", click.INT
    ] = (1, 2, 3),
    shares: Annotated[
        tuple[int, ...],
        "Cache of one in this many of the workload's blocks; repeat for more.",
        "--share",
    ] = (4, 16),
    hours: Annotated[float, "Length of a generated workload.", click.FloatRange(min=0.01)] = 1.0,
    json_file: str | None,
) -> None:
    """Compare eviction policies: what share of an unlimited cache's hits a small one keeps."""
    from benchmarks.suite.pool.reuse import KNOWN, WORKLOADS, bench_reuse

    unknown = [name for name in workloads if name not in KNOWN]
    if unknown:
        fail(f"there is no workload {unknown[0]!r}; use {', '.join(KNOWN)}")
    show(
        lambda: bench_reuse(traces, workloads or WORKLOADS, seeds, shares, hours, click.echo),
        json_file,
    )


@click.command()
@options
@json_option
def prefetch(
    *,
    workloads: Annotated[
        tuple[str, ...],
        "Generated workload, by the name of its profile; three kinds of sessions unless given.",
        "--workload",
    ] = (),
    requests: Annotated[int, "Number of requests."] = 2000,
    rate: Annotated[float, "Requests per second.", click.FloatRange(min=0.01)] = 1.2,
    kv_tokens: Annotated[int, "Tokens of KVCache in DRAM per instance."] = 700_000,
    json_file: str | None,
) -> None:
    """Simulate sessions without and with prefetching from the SSD."""
    from benchmarks.suite.pool.prefetch import WORKLOADS, bench_prefetch
    from moonpool.trace.builtin import BUILT_IN

    unknown = [name for name in workloads if name not in BUILT_IN]
    if unknown:
        fail(f"there is no workload {unknown[0]!r}; use {', '.join(BUILT_IN)}")
    show(
        lambda: bench_prefetch(workloads or WORKLOADS, requests, rate, kv_tokens, click.echo),
        json_file,
    )
