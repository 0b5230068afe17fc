"""`moonpool bench speculation`: what drafts bring and cost."""

from __future__ import annotations

import click

from moonpool.cli.options import COUNT, json_option
from moonpool.cli.output import fail, show_figures


@click.command()
@click.option(
    "--model",
    default="smollm2",
    show_default=True,
    help="Model with a chat template: a GGUF file, a Hugging Face folder or id.",
)
@click.option("--dtype", default="float32", show_default=True, help="Number format of KVCache.")
@click.option(
    "--answer-tokens", type=COUNT, default=160, show_default=True, help="Tokens of each answer."
)
@click.option("--rounds", type=COUNT, default=3, show_default=True, help="Answers of each case.")
@click.option(
    "--draft-layers",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    help="First layers of the model that serve as a draft model; 0 leaves these rows out.",
)
@json_option
def speculation(
    model: str,
    dtype: str,
    answer_tokens: int,
    rounds: int,
    draft_layers: int,
    json_file: str | None,
) -> None:
    """Measure tokens per second with drafts and without, on repetitive and other texts."""
    from benchmarks.suite.engine.speculation import bench_speculation
    from moonpool.config import SpeculativeConfig
    from moonpool.engine.spec import ModelError

    settings = SpeculativeConfig(method="ngram")
    try:
        found = bench_speculation(
            model, dtype, answer_tokens, rounds, settings, draft_layers, click.echo
        )
    except ModelError as error:
        fail(str(error))
    show_figures(found, json_file)
