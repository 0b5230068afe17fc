"""`moonpool bench attention`: what attention workers cost, and what they hold."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from moonpool.cli.origin import origin
from moonpool.cli.output import COUNT, fail, write_json

if TYPE_CHECKING:
    from moonpool.bench.attention_capacity import CapacityResult


@click.command()
@click.option("--model", default="random:m150", show_default=True)
@click.option("--workers", type=COUNT, default=1, show_default=True)
@click.option("--batch", "batches", multiple=True, type=COUNT, default=(1, 8, 16))
@click.option("--context", "contexts", multiple=True, type=COUNT, default=(512, 4096))
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="bfloat16")
@click.option("--repeats", type=COUNT, default=5, show_default=True)
@click.option("--capacity", is_flag=True, help="Time between tokens over requests at once.")
@click.option("--requests", type=COUNT, default=8, help="With --capacity: in one memory.")
@click.option(
    "--holds", type=COUNT, default=1, help="With --capacity: a worker's, times the instance's own."
)
@click.option(
    "--slo-tbt",
    type=click.FloatRange(min=0.0),
    default=0.0,
    help="With --capacity: seconds; how many requests at once keep it.",
)
@click.option("--plot", type=click.Path(dir_okay=False), help="With --capacity: a PNG of it.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help="Write figures.")
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
    """Attention offloading: where a step's time goes, with attention workers and without, and one
    message; or what they can hold, with 0, 1, ... --workers of them and the last --context."""
    from moonpool.attention.client import AttentionError
    from moonpool.bench import attention as steps
    from moonpool.bench import attention_capacity as held

    if plot is not None and not capacity:
        fail("--plot draws what --capacity measures: give both")
    result: steps.AttentionResult | held.CapacityResult
    try:
        if capacity:
            crews = range(1, workers + 1)
            result = held.bench_attention_capacity(
                model, crews, requests, contexts[-1], repeats, dtype, holds, slo_tbt
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
    from moonpool.report.offload_curve import plot_offload

    drawn = [(c.words, [(p.requests, p.times) for p in c.points]) for c in result.curves]
    title = f"{result.model}, {result.context_tokens} tokens a request"
    try:
        plot_offload(drawn, result.limit_s, title, Path(plot))
    except OSError as error:
        fail(f"cannot write {plot}: {error.strerror}")
