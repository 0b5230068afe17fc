"""Help that fits a screen: `--help` shows what most people need, `--help all` every flag."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import click

MAX_LINES = 40
"""Most lines of `--help`, at 80 columns. A test holds it for every command."""
_META = "moonpool.help"
_CLAUSE = re.compile(r"(?s).*?(?=[;:] |\. )")


def show_everything(context: click.Context) -> None:
    """Makes the help of this command, and of its subcommands, list all flags."""
    context.meta[_META] = "all"


def shows_everything(context: click.Context) -> bool:
    return context.meta.get(_META) == "all"


class ScreenHelp(click.Command):
    """A command, or a group, that has a short help and a full one. `screen` names the flags of the
    short help, in their order. Without it, the help is always full."""

    screen: Sequence[str] = ()

    def __init__(self, *args: Any, screen: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.screen = screen

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        names = self.get_help_option_names(ctx)
        if not names or not self.add_help_option:
            return None

        def show(context: click.Context, param: click.Parameter, value: str | None) -> None:
            if value is None or context.resilient_parsing:
                return
            if value == "all":
                show_everything(context)
            click.echo(context.get_help(), color=context.color)
            context.exit()

        return click.Option(
            names,
            is_flag=False,
            flag_value="screen",
            is_eager=True,
            expose_value=False,
            callback=show,
            metavar="[all]",
            help="Show this help; `all`: every flag." if self.screen else "Show this help.",
        )

    def is_short(self, ctx: click.Context) -> bool:
        return bool(self.screen) and not shows_everything(ctx)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        if not self.is_short(ctx):
            self.format_all_options(ctx, formatter)
            return
        by_flag = {opt: param for param in self.get_params(ctx) for opt in param.opts}
        records = [by_flag[flag].get_help_record(ctx) for flag in (*self.screen, "--help")]
        with formatter.section("Options"):
            formatter.write_dl([_in_short(record) for record in records if record])
        shown = [p for p in self.get_params(ctx) if isinstance(p, click.Option) and not p.hidden]
        formatter.write_paragraph()
        formatter.write_text(f"All {len(shown)} flags: {ctx.command_path} --help all")

    def format_all_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Lists every option that is not hidden."""
        super().format_options(ctx, formatter)


def _in_short(record: tuple[str, str]) -> tuple[str, str]:
    """The first clause of what an option does, with its default."""
    name, text = record
    words, _, default = text.partition("  [")
    found = _CLAUSE.match(words)
    short = words if found is None else f"{found[0]}."
    value = name.partition(" ")[2]
    if not value.startswith("[") and "[" in value:  # a part of the value is optional
        name = name.partition("[")[0]
    return name, f"{short}  [{default}" if default else short
