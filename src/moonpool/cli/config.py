"""`moonpool config`: checks a config file, shows the values in effect, writes new files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from moonpool.cli.config_text import effective_toml, new_file, reference_page
from moonpool.cli.inputs import read_text
from moonpool.cli.main import SuggestingGroup
from moonpool.cli.options import ConfigFlags, SectionedCommand, config_option, read_config
from moonpool.cli.output import fail, writing
from moonpool.cli.serve import HEAD_FLAGS, SERVE_FLAGS, serve_overrides
from moonpool.cli.simulate import CLUSTER_DEFAULTS, SIMULATE_FLAGS, read_cluster
from moonpool.config.schema import Values, parse_toml, schema_of
from moonpool.config.tables import Config, ConfigError
from moonpool.sim.defaults import DEFAULTS

F = TypeVar("F", bound=Callable[..., Any])

_KEYS = SERVE_FLAGS.keys | HEAD_FLAGS.keys | SIMULATE_FLAGS.keys
_ALL_FLAGS = ConfigFlags(
    # `--device` means the engine's for `serve` and the catalogue's for `simulate`.
    *(key for key in schema_of(Config) if key in _KEYS and key != "hardware.device"),
    helps={"engine.device": "Device that computes; with --simulation one of the catalogue."},
    types={"engine.device": click.STRING},
)


@click.group(cls=SuggestingGroup)
def config() -> None:
    """Check a config file, show the values in effect, or write a new file."""


@config.command()
@click.argument("file", type=click.Path(dir_okay=False))
def check(file: str) -> None:
    """Check a config FILE.

    Checks its names, types and ranges, and whether its policies, keys and certificates load.
    """
    found = read_config(file, {})
    _check_references(file, found)
    given = parse_toml(read_text(file, "the config"), Config)
    number = sum(len(values) for values in given.values())
    tables = " ".join(f"[{name}]" for name in given) or "no table"
    click.echo(f"{file}: valid; {number} keys in {tables}")


def _check_references(file: str, found: Config) -> None:
    """Ends the command if policies, a file of keys or certificates that the configuration names are
    unusable."""
    from moonpool.api.access.protection import UNPROTECTED, protections
    from moonpool.plugins.policies import load_policies

    checks: list[Callable[[], object]] = [
        lambda: load_policies(found.conductor),
        *protections(found),
    ]
    problems = []
    for check in checks:
        try:
            check()
        except (ConfigError, *UNPROTECTED) as error:
            problems.append(f"{file}: {error}")
    if problems:
        fail(*problems)
    template = found.model.chat_template
    if template:
        read_text(template, f"{file}: the chat template")


@config.command(cls=SectionedCommand, screen=("--config", "--simulation"))
@click.argument("model", required=False)
@config_option
@click.option("--simulation", is_flag=True, help="Show what `simulate` would use, not `serve`.")
@_ALL_FLAGS.options(Config())
def show(model: str | None, config_file: str | None, simulation: bool, **flags: Any) -> None:
    """Show what `serve` would use with these flags.

    The output is TOML, with the place that each value comes from.

    API keys are counted and not shown.
    """
    if simulation:
        found, overrides = _simulated(config_file, flags)
        defaults: Values = DEFAULTS
    else:
        found, overrides = _served(model, config_file, flags)
        defaults = {}
    in_file = {}
    if config_file is not None:
        in_file = parse_toml(read_text(config_file, "the config"), Config)
    click.echo(effective_toml(found, overrides, in_file, defaults, os.environ), nl=False)


def _served(
    model: str | None, config_file: str | None, flags: dict[str, Any]
) -> tuple[Config, Values]:
    _refuse_others(flags, SERVE_FLAGS.keys | HEAD_FLAGS.keys, "serve")
    overrides = serve_overrides(flags)
    for table, values in HEAD_FLAGS.overrides(flags).items():
        overrides.setdefault(table, {}).update(values)
    if model is not None:
        overrides.setdefault("model", {})["name"] = model
    return read_config(config_file, overrides), overrides


def _simulated(config_file: str | None, flags: dict[str, Any]) -> tuple[Config, Values]:
    _refuse_others(flags, SIMULATE_FLAGS.keys | {"engine.device"}, "simulate")
    overrides = SIMULATE_FLAGS.overrides(flags)
    return read_cluster(config_file, overrides), overrides


def _refuse_others(flags: dict[str, Any], keys: frozenset[str], command: str) -> None:
    """Ends the command if a flag was given that the command shown does not have."""
    for table, values in _ALL_FLAGS.overrides(flags).items():
        for key in values:
            if f"{table}.{key}" not in keys:
                fail(f"`moonpool {command}` has no flag for {table}.{key}; leave it out")


@config.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False))
@click.option("--simulation", is_flag=True, help="Use the defaults of `simulate`, not of `serve`.")
def init(file: str | None, simulation: bool) -> None:
    """Write a commented config file.

    The file has every key with its meaning and its default. Without FILE it is printed.

    An existing file is kept.
    """
    text = new_file(CLUSTER_DEFAULTS if simulation else Config())
    if file is None:
        click.echo(text, nl=False)
        return
    if Path(file).exists():
        fail(f"{file} exists already; name another file, or delete it first")
    with writing(file), Path(file).open("x", encoding="utf-8") as new:
        new.write(text)
    click.echo(f"wrote {file}; remove the # before the keys to change")


@config.command()
def reference() -> None:
    """Print the reference page of all keys (docs/config.md)."""
    click.echo(reference_page(), nl=False)


@config.command()
def schema() -> None:
    """Print a JSON schema of the file.

    Editors complete and check TOML by it.
    """
    text = msgspec.json.encode(msgspec.json.schema(Config))
    click.echo(msgspec.json.format(text, indent=2).decode())
