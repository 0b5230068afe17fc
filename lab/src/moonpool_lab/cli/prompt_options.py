"""The options of commands that play a trace to a server: which requests they send, and as which
model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def prompt_options(command: F) -> F:
    """`--model`, `--vocab` and `--prompts`."""
    options = (
        click.option("--model", help="Model to request; the server's first unless given."),
        click.option(
            "--vocab",
            "vocab_size",
            type=click.IntRange(min=2),
            help="Draw token ids below this number; the server's vocabulary unless given.",
        ),
        click.option(
            "--prompts",
            type=click.Choice(["ids", "text"]),
            default="ids",
            show_default=True,
            help="Send token ids, or words to a server that takes no ids.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command
