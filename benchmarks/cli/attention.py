"""`moonpool bench attention`: what attention workers cost, and what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import msgspec

from benchmarks.cli.annotated import Model, Repeats, options
from moonpool.cli.options import json_option
from moonpool.cli.output import fail, one_line, origin, write_json, writing

if TYPE_CHECKING:
    from benchmarks.suite.offload.attention_capacity import CapacityResult


@click.command()
@options
@json_option
def attention(
    *,
    model: Model = "random:m150",
    workers: Annotated[int, "Most attention workers."] = 1,
    batches: Annotated[
        tuple[int, ...], "Number of sequences of a decode step; repeat for more.", "--batch"
    ] = (1, 8, 16),
    contexts: Annotated[
        tuple[int, ...], "Context tokens of each sequence; repeat for more.", "--context"
    ] = (512, 4096),
    dtype: Annotated[
        str, "Number format of weights and KVCache.", click.Choice(["float32", "bfloat16"])
    ] = "bfloat16",
    repeats: Repeats = 5,
    capacity: Annotated[
        bool, "Measure the time between tokens over the number of requests at once."
    ] = False,
    requests: Annotated[int, "With --capacity: requests that one memory holds."] = 8,
    holds: Annotated[
        int, "With --capacity: memory of a worker, as a multiple of the instance's own."
    ] = 1,
    slo_tbt: Annotated[
        float,
        "With --capacity: time between tokens to keep, in seconds.",
        click.FloatRange(min=0.0),
    ] = 0.0,
    plot: Annotated[
        str | None,
        "With --capacity: draw the figures to this PNG file.",
        click.Path(dir_okay=False),
    ] = None,
    json_file: str | None,
) -> None:
    """Measure attention offloading: the parts of a step, with and without attention workers.

    With --capacity: how many requests 0, 1, ... --workers attention workers hold, with the last
    --context.
    """
    from benchmarks.suite.offload import attention as steps
    from benchmarks.suite.offload import attention_capacity as held
    from moonpool_engine.attention_offload.client import AttentionError

    if plot is not None and not capacity:
        fail("--plot draws what --capacity measures: give both")
    result: steps.AttentionResult | held.CapacityResult
    with one_line(AttentionError, ValueError):
        if capacity:
            group_sizes = range(1, workers + 1)
            result = held.bench_attention_capacity(
                model, group_sizes, requests, contexts[-1], repeats, dtype, holds, slo_tbt
            )
            said = held.capacity_lines(result)
        else:
            result = steps.bench_attention(model, workers, batches, contexts, repeats, dtype)
            said = steps.lines(result)
    for line in said:
        click.echo(line)
    if plot is not None and isinstance(result, held.CapacityResult):
        _plot_capacity(result, plot)
    if json_file:
        write_json(json_file, msgspec.to_builtins(result) | {"origin": origin()})


def _plot_capacity(result: CapacityResult, plot: str) -> None:
    from moonpool_lab.profiling.plots import plot_offload

    drawn = [(c.words, [(p.requests, p.times) for p in c.points]) for c in result.curves]
    title = f"{result.model}, {result.context_tokens} tokens a request"
    with writing(plot):
        plot_offload(drawn, result.limit_s, title, Path(plot))
