"""Tests options that are made from the parameters of a function."""

from __future__ import annotations

import inspect
from typing import Annotated, Any, Literal

import click
import pytest
from click.testing import CliRunner

from benchmarks.cli.annotated import Seed, options
from benchmarks.cli.commands import bench


@click.command()
@options
def example(
    *,
    model: Annotated[str, "Name of the model."],
    sizes: Annotated[tuple[int, ...], "Sizes to run.", "--size"] = (1, 2),
    seconds: Annotated[float, "Seconds of a run."] = 2.5,
    kind: Annotated[Literal["near", "far"], "Where the peer is."] = "near",
    limit: Annotated[int | None, "Most runs."] = None,
    quiet: Annotated[bool, "Print nothing."] = False,
    seed: Seed = 0,
) -> None:
    """An example."""
    click.echo(repr((model, sizes, seconds, kind, limit, quiet, seed)))


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ((), ("m", (1, 2), 2.5, "near", None, False, 0)),
        (
            [
                "--size",
                "7",
                "--size",
                "8",
                "--seconds",
                "1",
                "--kind",
                "far",
                "--limit",
                "3",
                "--quiet",
                "--seed",
                "-4",
            ],
            ("m", (7, 8), 1.0, "far", 3, True, -4),
        ),
    ],
)
def test_values_arrive_with_their_types(arguments: Any, wanted: tuple[Any, ...]) -> None:
    done = CliRunner().invoke(example, ["--model", "m", *arguments])
    assert done.output == f"{wanted!r}\n"


@pytest.mark.parametrize(
    "arguments",
    ["", "--model m --size 0", "--model m --seconds 0", "--model m --kind other"],
)
def test_values_out_of_range_are_refused(arguments: str) -> None:
    assert CliRunner().invoke(example, arguments.split()).exit_code == 2


def test_help_names_what_each_option_is() -> None:
    text = " ".join(CliRunner().invoke(example, ["--help"]).output.split())
    assert "--size INTEGER RANGE Sizes to run. [default: 1, 2; x>=1]" in text
    assert "--kind [near|far] Where the peer is. [default: near]" in text
    assert "--model TEXT Name of the model. [required]" in text


@pytest.mark.parametrize("name", sorted(bench.commands))
def test_each_parameter_of_a_benchmark_is_an_option_with_a_meaning(name: str) -> None:
    command = bench.commands[name]
    assert command.callback is not None
    taken = inspect.signature(command.callback).parameters.values()
    named = {one.name for one in taken if one.kind is not one.VAR_KEYWORD}
    options = {param.name for param in command.params}
    assert named and named <= options
    assert named == options or len(named) < len(taken), "the others go to **kwargs"
    for param in command.params:
        assert not isinstance(param, click.Option) or param.hidden or param.help, param.name
