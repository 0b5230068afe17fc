"""The `moonpool` command. A sub-command is imported only when it runs, so `--help` is quick."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Iterable
from typing import Any, ClassVar

import click

from moonpool import __version__
from moonpool.cli.examples import epilog
from moonpool.cli.help_screen import ScreenHelp
from moonpool.plugins.entry_points import EXTRA_OF_COMMAND, CommandTable, added_commands

COMMANDS: CommandTable = {
    "run": ("moonpool.cli.run.command", "run", "Chat with a model on this machine."),
    "serve": ("moonpool.cli.serve", "serve", "Start head and workers on this machine and serve."),
    "head": ("moonpool.cli.serve", "head", "Start the head alone; workers join it."),
    "worker": ("moonpool.cli.worker", "worker", "Start one instance, which joins a head."),
    "epp": ("moonpool.cli.epp", "epp", "Pick endpoints for an inference gateway, such as Envoy."),
    "status": ("moonpool.cli.watch.status", "status", "Show a running cluster in five lines."),
    "rewind": ("moonpool.cli.rewind", "rewind", "Replay the decisions of a running server."),
    "top": ("moonpool.cli.watch.top", "top", "Watch a running cluster in the terminal."),
    "config": ("moonpool.cli.config", "config", "Check, show or write a config file."),
    "simulate": ("moonpool.cli.simulate", "simulate", "Replay a trace in simulated time."),
    "report": ("moonpool.cli.report", "report", "Show several runs beside each other."),
    "plan": (
        "moonpool.cli.plan",
        "plan",
        "Find the cheapest cluster that keeps your limits of latency.",
    ),
    "trace": ("moonpool.cli.trace", "trace", "Inspect, generate and download workloads."),
    "pool": (
        "moonpool.cli.pool",
        "pool",
        "Show KVCache in memory and on disk, or keep that of vLLM servers.",
    ),
    "upgrade": (
        "moonpool.cli.watch.upgrade",
        "upgrade",
        "Replace every process of a cluster, without an end of answers.",
    ),
    "doctor": ("moonpool.cli.doctor", "doctor", "Show this machine, and what to set."),
    "completion": (
        "moonpool.cli.completion",
        "completion",
        "Print a script for your shell's Tab.",
    ),
    "man": ("moonpool.cli.completion", "man", "Print manual pages."),
    # the supervisor starts these
    "fork-server": ("moonpool.cli.head_process", "fork_server", ""),
    "head-process": ("moonpool.cli.head_process", "head_process", ""),
    "front-process": ("moonpool.cli.head_process", "front_process", ""),
    "next-supervisor": ("moonpool.cli.serve", "next_supervisor", ""),
}
"""The commands of this package. Other packages add more (`added_commands`)."""

HEADINGS = {
    "Serve": ("run", "serve", "demo", "head", "worker", "epp", "pool", "upgrade"),
    "Watch and check": (
        *("doctor", "status", "top", "rewind"),
        *("trial", "replay", "compare", "profile", "bench"),
    ),
    "Simulate and plan": (
        *("simulate", "report", "plan", "trace"),
        *("forecast", "oracle", "reproduce"),
    ),
}
"""The commands below each heading of `moonpool --help`; the others come last."""
LAST_HEADING = "Set up"


HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class SuggestingGroup(ScreenHelp, click.Group):
    """A group that suggests the nearest command for an unknown name. The help of its commands
    ends with their examples."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = self.find_command(ctx, cmd_name)
        if found is not None:
            found.epilog = epilog(self.path_of(cmd_name))
        return found

    def path_of(self, name: str) -> str:
        """Returns the name of a command without the program's, such as "pool serve"."""
        return f"{self.name} {name}"

    def find_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            near = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            if not near:
                raise
            text = f"No such command {args[0]!r}. Did you mean {near[0]!r}?"
            raise click.UsageError(text, error.ctx) from None


class ExtendedGroup(SuggestingGroup):
    """A group of commands to which other packages add their commands."""

    own: ClassVar[CommandTable] = {}
    prefix: ClassVar[str] = ""
    """How the names of its commands begin in a `CommandTable`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        added = [name for name, (_, _, text) in self._added().items() if text]
        own = [name for name, (_, _, text) in self.own.items() if text]
        return [*own, *super().list_commands(ctx), *added]

    def find_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = super().find_command(ctx, cmd_name)
        if found is not None:
            return found
        entry = self.own.get(cmd_name) or self._added().get(cmd_name)
        if entry is None:
            return None
        command: click.Command = getattr(importlib.import_module(entry[0]), entry[1])
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        extra = EXTRA_OF_COMMAND.get(f"{self.prefix}{args[0]}")
        if extra is not None and self.get_command(ctx, args[0]) is None:
            # `main` makes one line of this error
            raise ModuleNotFoundError(name=f"moonpool_{extra}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([*self.rows(ctx).items()])

    def rows(self, ctx: click.Context) -> dict[str, str]:
        """Returns one line of help by the command's name."""
        texts = {name: text for name, (_, _, text) in {**self.own, **self._added()}.items()}
        return {
            name: texts.get(name) or self.commands[name].get_short_help_str(80)
            for name in self.list_commands(ctx)
        }

    def _added(self) -> CommandTable:
        return {
            name.removeprefix(self.prefix): entry
            for name, entry in added_commands().items()
            if name.startswith(self.prefix) and " " not in name.removeprefix(self.prefix)
        }


class RootGroup(ExtendedGroup):
    """Imports a command only when it runs, so `--help` is quick."""

    own: ClassVar[CommandTable] = COMMANDS

    def path_of(self, name: str) -> str:
        return name

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the commands below headings without empty lines, so that all fits a screen."""
        rows = self.rows(ctx)
        width = max(map(len, rows))
        formatter.write_paragraph()
        for heading, names in under_headings(rows).items():
            formatter.write_heading(heading)
            formatter.indent()
            formatter.write_dl([(name.ljust(width), rows[name]) for name in names])
            formatter.dedent()


def under_headings(names: Iterable[str]) -> dict[str, list[str]]:
    """The commands that there are, by the headings of `moonpool --help`."""
    there = list(names)
    listed = {name for below in HEADINGS.values() for name in below}
    found = {
        heading: [name for name in below if name in there] for heading, below in HEADINGS.items()
    }
    found[LAST_HEADING] = [name for name in there if name not in listed]
    return {heading: below for heading, below in found.items() if below}


@click.group(cls=RootGroup, context_settings=HELP)
@click.version_option(__version__, prog_name="moonpool")
def cli() -> None:
    """Serve language models over one cache of prompts; plan clusters of them."""


EXTRA_OF = {
    "moonpool_engine": "engine",
    "torch": "engine",
    "safetensors": "engine",
    "scipy": "plan",
    "matplotlib": "lab",
    "moonpool_lab": "lab",
    "zmq": "vllm",
    "grpc": "epp",
    "grpc_health": "epp",
    "grpc_reflection": "epp",
    "envoy": "epp",
    "google": "epp",
    "yaml": "epp",
    "dns": "epp",
    "ray": "ray",
}
"""The extra of moonpool that installs a package which not every command needs."""


def main(**arguments: Any) -> None:
    """Runs the command. A package that is absent is one line on stderr and status 1. Raises
    SystemExit."""
    try:
        cli(**arguments)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRA_OF:
            raise
        from moonpool.installation import install_command

        extra = EXTRA_OF[package]
        sys.stderr.write(
            f"moonpool: this needs {package}, which is not installed: {install_command(extra)}\n"
        )
        raise SystemExit(1) from None
