"""Tests that no flag is lost: every command has the flags of the list, and the help shows all
flags."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from moonpool.cli.help_screen import MAX_LINES
from moonpool.cli.main import COMMANDS as OWN_COMMANDS
from moonpool.cli.main import HEADINGS, LAST_HEADING, cli, under_headings
from moonpool.cli.options import ConfigFlags, SectionedCommand
from moonpool.config.schema import schema_of
from moonpool.config.tables import Config
from moonpool.plugins.entry_points import added_commands
from tests.cli_runner import succeed
from website.command_page import command_page

GOLDEN = Path(__file__).parent / "golden_flags.json"
"""Maps each command to its flags and arguments. Add each new flag here, and never remove a flag."""


HIDDEN = [name for name, (_, _, text) in {**OWN_COMMANDS, **added_commands()}.items() if not text]


def commands(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command)
        names = [*command.list_commands(context), *(HIDDEN if command is cli else ())]
        for each in names:
            found = command.get_command(context, each)
            assert found is not None
            yield from commands(found, f"{name} {each}")


COMMANDS = dict(commands(cli, "moonpool"))


def flags_of(command: click.Command) -> list[str]:
    return sorted(flag for p in command.params for flag in (*p.opts, *p.secondary_opts))


def test_no_flag_is_lost_and_none_is_unlisted() -> None:
    golden: dict[str, list[str]] = json.loads(GOLDEN.read_text())
    assert {name: flags_of(command) for name, command in COMMANDS.items()} == golden


def test_every_option_has_a_help_text_that_is_a_sentence() -> None:
    for name, command in COMMANDS.items():
        for param in command.params:
            if isinstance(param, click.Option) and not param.hidden:
                text = (param.help or "").partition("  [default")[0]
                assert text[:1].isupper() and text.endswith("."), f"{name} {param.opts}: {text!r}"


def test_every_key_of_the_config_has_a_description() -> None:
    for name, field in schema_of(Config).items():
        text = field.meta.description or ""
        assert text[:1].isupper() and text.endswith("."), name


def shown(name: str, *words: str) -> str:
    done = succeed(*name.split()[1:], *words, terminal_width=80)
    return done.output


VISIBLE = [name for name, command in COMMANDS.items() if not command.hidden]


@pytest.mark.parametrize("name", VISIBLE)
def test_help_fits_a_screen_and_help_all_has_every_flag(name: str) -> None:
    screen, whole = shown(name, "--help"), shown(name, "--help", "all")
    assert len(screen.splitlines()) <= MAX_LINES
    command = COMMANDS[name]
    options = [p for p in command.params if isinstance(p, click.Option) and not p.hidden]
    assert [p.opts[0] for p in options if p.opts[0] not in whole] == []
    left_out = [p.opts[0] for p in options if p.opts[0] not in screen]
    assert ("--help all" in screen) >= bool(left_out), "the short help says where the rest is"


def test_every_command_is_below_one_heading() -> None:
    names = cli.list_commands(click.Context(cli))
    found = under_headings(names)
    assert sorted(name for below in found.values() for name in below) == sorted(names)
    assert found[LAST_HEADING] == ["config", "completion", "man"], "new ones have a heading"
    missing = {name for below in HEADINGS.values() for name in below} - set(names)
    assert not missing, "no heading names a command that is gone"
    lines = [line.strip() for line in shown("moonpool", "--help").splitlines()]
    assert [line for line in lines if line.rstrip(":") in found] == [f"{each}:" for each in found]


@pytest.mark.parametrize("name", ["serve", "head", "simulate", "plan"])
def test_help_lists_all_options_by_table(name: str) -> None:
    whole = shown(f"moonpool {name}", "--help", "all")
    assert whole.index("[pool]:") < whole.index("--block-size")


def test_the_page_of_commands_has_every_flag() -> None:
    page = command_page()
    for command in (COMMANDS[name] for name in VISIBLE):
        for param in command.params:
            if isinstance(param, click.Option) and not param.hidden:
                assert param.opts[0] in page


def test_a_type_of_its_own_for_a_key() -> None:
    flags = ConfigFlags("conductor.placement", types={"conductor.placement": click.STRING})

    @click.command(cls=SectionedCommand)
    @flags.options(Config())
    def command(**given: str | None) -> None:
        assert flags.overrides(given) == {"conductor": {"placement": "module:Class"}}

    done = CliRunner().invoke(command, ["--placement", "module:Class"], catch_exceptions=False)
    assert done.exit_code == 0


def test_flags_that_are_not_given_override_nothing() -> None:
    flags = ConfigFlags("pool.prefix_caching", "api.api_keys", "engine.threads")

    @click.command()
    @flags.options(Config())
    def command(**given: object) -> None:
        click.echo(json.dumps(flags.overrides(given)))

    def overrides(*words: str) -> object:
        return json.loads(CliRunner().invoke(command, words, catch_exceptions=False).output)

    assert overrides() == {}
    assert overrides("--no-enable-prefix-caching") == {"pool": {"prefix_caching": False}}
    assert overrides("--threads", "0") == {"engine": {"threads": 0}}
    assert overrides("--api-key", "a", "--api-key", "b") == {"api": {"api_keys": ["a", "b"]}}
