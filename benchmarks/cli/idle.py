"""`moonpool bench idle`."""

from __future__ import annotations

from typing import Annotated

import click

from benchmarks.cli.annotated import Model, options
from benchmarks.cli.output import measure
from moonpool.cli.options import json_option
from moonpool.cli.output import check_folders


@click.command()
@options
@json_option
def idle(
    *,
    model: Model = "moonpool/induction",
    prefill: Annotated[int, "Number of prefill instances."] = 2,
    decode: Annotated[int, "Number of decode instances."] = 2,
    kv_tokens: Annotated[
        int,
        "Tokens of KVCache per instance; 0 takes the default of `serve`.",
        click.IntRange(min=0),
    ] = 0,
    seconds: Annotated[
        float, "Seconds over which CPU time is counted.", click.FloatRange(1.0)
    ] = 60.0,
    json_file: str | None,
) -> None:
    """Measure memory, CPU time and wake-ups of each process of a cluster that serves nothing."""
    from benchmarks.suite.live.idle import bench_idle

    check_folders(json_file)
    flags = ["--kv-tokens", str(kv_tokens)] if kv_tokens else []
    measure(lambda: bench_idle(model, prefill, decode, flags, seconds, click.echo), json_file)
