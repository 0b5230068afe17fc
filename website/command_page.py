"""The page of all commands with their flags, from click."""

from __future__ import annotations

from collections.abc import Iterator

import click

from moonpool.cli.help_screen import show_everything
from moonpool.cli.main import cli

HEAD = """# Commands

Every command and flag, as `--help` prints them. [Configuration](config.md) says which key of a
config file each flag sets.
"""


def command_page() -> str:
    """Returns the page as Markdown, with a section for each command."""
    context = click.Context(cli, info_name="moonpool", max_content_width=100, terminal_width=100)
    show_everything(context)
    sections = [
        f"## {own.command_path}\n\n```text\n{own.get_help()}\n```\n" for own in _contexts(context)
    ]
    return "\n".join([HEAD, *sections])


def _contexts(context: click.Context) -> Iterator[click.Context]:
    """Yields the context of this command and of all below it, in the order of `--help`."""
    yield context
    command = context.command
    if not isinstance(command, click.Group):
        return
    for name in command.list_commands(context):
        below = command.get_command(context, name)
        if below is not None and not below.hidden:
            width = context.terminal_width
            yield from _contexts(
                click.Context(below, context, info_name=name, terminal_width=width)
            )
