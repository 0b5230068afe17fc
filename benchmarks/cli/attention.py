"""`moonpool bench attention`: what attention workers cost, and what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from moonpool.cli.options import COUNT
from moonpool.cli.output import fail, origin, write_json

if TYPE_CHECKING:
    from benchmarks.suite.offload.attention_capacity import CapacityResult


@click.command()
@click.option(
    "--model",
    default="random:m150",
    show_default=True,
    help="Model: a built-in, or a Hugging Face folder or id.",
)
@click.option("--workers", type=COUNT, default=1, show_default=True, help="Most attention workers.")
@click.option(
    "--batch",
    "batches",
    multiple=True,
    type=COUNT,
    default=(1, 8, 16),
    help="Number of sequences of a decode step; repeat for more.",
)
@click.option(
    "--context",
    "contexts",
    multiple=True,
    type=COUNT,
    default=(512, 4096),
    help="Context tokens of each sequence; repeat for more.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    default="bfloat16",
    help="Number format of weights and KVCache.",
)
@click.option(
    "--repeats", type=COUNT, default=5, show_default=True, help="Measure each case this often."
)
@click.option(
    "--capacity",
    is_flag=True,
    help="Measure the time between tokens over the number of requests at once.",
)
@click.option(
    "--requests", type=COUNT, default=8, help="With --capacity: requests that one memory holds."
)
@click.option(
    "--holds",
    type=COUNT,
    default=1,
    help="With --capacity: memory of a worker, as a multiple of the instance's own.",
)
@click.option(
    "--slo-tbt",
    type=click.FloatRange(min=0.0),
    default=0.0,
    help="With --capacity: time between tokens to keep, in seconds.",
)
@click.option(
    "--plot",
    type=click.Path(dir_okay=False),
    help="With --capacity: draw the figures to this PNG file.",
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False), help="Write all figures to this file."
)
def attention(
    model: str,
    workers: int,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    dtype: str,
    repeats: int,
    capacity: bool,
    requests: int,
    holds: int,
    slo_tbt: float,
    plot: str | None,
    json_file: str | None,
) -> None:
    """Measure attention offloading: the parts of a step, with and without attention workers.

    With --capacity: how many requests 0, 1, ... --workers of them hold, with the last --context.
    """
    from benchmarks.suite.offload import attention as steps
    from benchmarks.suite.offload import attention_capacity as held
    from moonpool.attention_offload.client import AttentionError

    if plot is not None and not capacity:
        fail("--plot draws what --capacity measures: give both")
    result: steps.AttentionResult | held.CapacityResult
    try:
        if capacity:
            group_sizes = range(1, workers + 1)
            result = held.bench_attention_capacity(
                model, group_sizes, requests, contexts[-1], repeats, dtype, holds, slo_tbt
            )
            said = held.capacity_lines(result)
        else:
            result = steps.bench_attention(model, workers, batches, contexts, repeats, dtype)
            said = steps.lines(result)
    except (AttentionError, ValueError) as error:
        fail(str(error))
    for line in said:
        click.echo(line)
    if plot is not None and isinstance(result, held.CapacityResult):
        _plot_capacity(result, plot)
    if json_file:
        write_json(json_file, msgspec.to_builtins(result) | {"origin": origin()})


def _plot_capacity(result: CapacityResult, plot: str) -> None:
    from moonpool.profiling.plots import plot_offload

    drawn = [(c.words, [(p.requests, p.times) for p in c.points]) for c in result.curves]
    title = f"{result.model}, {result.context_tokens} tokens a request"
    try:
        plot_offload(drawn, result.limit_s, title, Path(plot))
    except OSError as error:
        fail(f"cannot write {plot}: {error.strerror}")
