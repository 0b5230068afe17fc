"""The examples in the help name existing commands and flags."""

from __future__ import annotations

import shlex

import click
import pytest

from moonpool.cli.completion import manual_page
from moonpool.cli.examples import EXAMPLES
from moonpool.cli.main import cli

LINES = [(name, line) for name, lines in EXAMPLES.items() for line in lines]


def context_of(name: str) -> click.Context:
    context = click.Context(cli, info_name="moonpool")
    for word in name.split():
        assert isinstance(context.command, click.Group)
        command = context.command.get_command(context, word)
        assert command is not None, name
        context = click.Context(command, context, info_name=word)
    return context


@pytest.mark.parametrize(("name", "line"), LINES, ids=[line for _, line in LINES])
def test_an_example_is_a_line_of_its_command_and_in_its_help(name: str, line: str) -> None:
    assert len(line) <= 67, "a line of a screen"
    words = shlex.split(line.rpartition("| ")[2])
    own = name.split()
    assert words[: len(own) + 1] == ["moonpool", *own]
    context = context_of(name)
    context.command.make_parser(context).parse_args(words[len(own) + 1 :])
    assert f"\n  Example: {line}\n" in f"{context.get_help()}\n"
    assert line.replace("-", r"\-") in manual_page(context)


def test_a_flag_that_there_is_not_would_be_noticed() -> None:
    context = context_of("pool serve")
    with pytest.raises(click.NoSuchOption):
        context.command.make_parser(context).parse_args(["--drum", "8GiB"])
