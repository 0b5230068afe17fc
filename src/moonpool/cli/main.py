"""The `moonpool` command. A sub-command is imported only when it runs, so `--help` is quick."""

from __future__ import annotations

import difflib
import importlib
import sys
from typing import Any

import click

from moonpool import __version__

COMMANDS = {
    "serve": ("moonpool.cli.serve", "serve", "Start head and workers on this machine and serve."),
    "head": ("moonpool.cli.serve", "head", "Start the head alone; workers join it."),
    "worker": ("moonpool.cli.worker", "worker", "Start one instance that joins a head."),
    "demo": ("moonpool.cli.demo", "demo", "Show the main job end to end on a local cluster."),
    "status": ("moonpool.cli.watch.status", "status", "Show a running cluster in five lines."),
    "rewind": ("moonpool.cli.rewind", "rewind", "Replay what a server's Conductor decided."),
    "top": ("moonpool.cli.watch.top", "top", "Watch a running cluster in the terminal."),
    "config": ("moonpool.cli.config", "config", "Check, show or write a config file."),
    "replay": ("moonpool.cli.replay", "replay", "Send a trace to a live server."),
    "compare": ("moonpool.cli.replay", "compare", "Compare a simulation with a replay."),
    "trial": (
        "moonpool.cli.trial",
        "trial",
        "Look for wrong answers of any OpenAI server.",
    ),
    "simulate": ("moonpool.cli.simulate", "simulate", "Replay a trace in simulated time."),
    "report": ("moonpool.cli.report", "report", "Show several runs beside each other."),
    "plan": ("moonpool.cli.plan", "plan", "Find the cheapest cluster that keeps the SLOs."),
    "oracle": ("moonpool.cli.oracle", "oracle", "Compare policies with knowing the future."),
    "trace": ("moonpool.cli.trace", "trace", "Inspect, generate and download workloads."),
    "reproduce": (
        "moonpool.cli.reproduce",
        "reproduce",
        "Reproduce a table or figure of the papers.",
    ),
    "profile": ("moonpool.cli.profile", "profile", "Measure this machine and fit the cost model."),
    "pool": ("moonpool.cli.pool", "pool", "Show the KVCache pool; check or clear a disk."),
    "upgrade": (
        "moonpool.cli.watch.upgrade",
        "upgrade",
        "Replace every process of a cluster, without an end of answers.",
    ),
    "bench": ("moonpool.cli.bench", "bench", "Run a benchmark against a limit or a peer."),
}
INTERNAL = {  # the supervisor and workers start these
    "fork-server": ("moonpool.cli.head_process", "fork_server"),
    "head-process": ("moonpool.cli.head_process", "head_process"),
    "next-supervisor": ("moonpool.cli.serve", "next_supervisor"),
    "stage": ("moonpool.cli.engine_process", "stage"),
    "rank": ("moonpool.cli.engine_process", "rank"),
}


HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class SuggestingGroup(click.Group):
    """A group that names the nearest command where there is none of a name."""

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


class LazyGroup(SuggestingGroup):
    """A group whose names and one-line helps come from the table above."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            module, attribute, _ = COMMANDS[cmd_name]
        elif cmd_name in INTERNAL:
            module, attribute = INTERNAL[cmd_name]
        else:
            return None
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])


@click.group(cls=LazyGroup, context_settings=HELP)
@click.version_option(__version__, prog_name="moonpool")
def cli() -> None:
    """KVCache-centric, disaggregated LLM serving."""


EXTRA_OF = {
    "torch": "engine",
    "safetensors": "engine",
    "scipy": "plan",
    "matplotlib": "plan",
    "zmq": "vllm",
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
