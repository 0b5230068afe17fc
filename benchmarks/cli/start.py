"""`moonpool bench start`."""

from __future__ import annotations

from typing import Annotated

import click

from benchmarks.cli.annotated import options
from benchmarks.cli.output import measure
from moonpool.cli.options import json_option
from moonpool.cli.output import check_folders


@click.command()
@click.argument("model", required=False)
@options
@json_option
def start(
    *,
    mixed: Annotated[int, "Number of mixed instances.", click.IntRange(min=0)] = 0,
    kv_tokens: Annotated[int, "Tokens of KVCache per instance."] = 4096,
    repeats: Annotated[int, "Starts after the first one."] = 3,
    model: str | None,
    json_file: str | None,
) -> None:
    """Measure the start of `serve`: seconds until ready and first token, and memory.

    MODEL is any model that `serve` takes. Without MODEL, a GGUF file of 1 GB with random weights is
    written below the folder for temporary files (TMPDIR), and deleted at the end.
    """
    from benchmarks.suite.live.start import bench_start

    check_folders(json_file)
    flags = ["--mixed", str(mixed)] if mixed else []
    measure(lambda: bench_start(model, flags, kv_tokens, repeats, click.echo), json_file)
