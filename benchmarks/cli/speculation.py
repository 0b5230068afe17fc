"""`moonpool bench speculation`: what drafts bring and cost."""

from __future__ import annotations

from typing import Annotated

import click

from benchmarks.cli.annotated import options
from benchmarks.cli.output import show
from moonpool.cli.options import json_option


@click.command()
@options
@json_option
def speculation(
    *,
    model: Annotated[
        str, "Model with a chat template: a GGUF file, a Hugging Face folder or id."
    ] = "smollm2",
    dtype: Annotated[str, "Number format of KVCache."] = "float32",
    answer_tokens: Annotated[int, "Tokens of each answer."] = 160,
    rounds: Annotated[int, "Answers of each case."] = 3,
    draft_layers: Annotated[
        int,
        "First layers of the model that serve as a draft model; 0 leaves these rows out.",
        click.IntRange(min=0),
    ] = 10,
    json_file: str | None,
) -> None:
    """Measure tokens per second with drafts and without, on repetitive and other texts."""
    from benchmarks.suite.engine.speculation import bench_speculation
    from moonpool.config.tables import SpeculativeConfig

    settings = SpeculativeConfig(method="ngram")
    show(
        lambda: bench_speculation(
            model, dtype, answer_tokens, rounds, settings, draft_layers, click.echo
        ),
        json_file,
    )
