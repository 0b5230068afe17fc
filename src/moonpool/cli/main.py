"""The `moonpool` command. Each sub-command is imported only when it runs, so that `--help` is
quick."""

from __future__ import annotations

import importlib
from typing import Any

import click

from moonpool import __version__

COMMANDS = {
    "serve": ("moonpool.cli.serve", "serve", "Start head and workers on this machine and serve."),
    "head": ("moonpool.cli.serve", "head", "Start the head alone; workers join it."),
    "worker": ("moonpool.cli.worker", "worker", "Start one instance that joins a head."),
    "demo": ("moonpool.cli.demo", "demo", "Run the main job end to end, and end."),
    "replay": ("moonpool.cli.replay", "replay", "Send a trace to a live server."),
    "compare": ("moonpool.cli.live", "compare", "Lay a simulation and a replay side by side."),
    "simulate": ("moonpool.cli.simulate", "simulate", "Replay a trace in simulated time."),
    "plan": ("moonpool.cli.plan", "plan", "What to buy: the cheapest that keeps the SLOs."),
    "trace": ("moonpool.cli.trace", "trace", "Read, make and get workloads."),
    "reproduce": ("moonpool.cli.reproduce", "reproduce", "A paper's figure beside ours."),
    "profile": ("moonpool.cli.profile", "profile", "Measure this machine; fit the cost model."),
    "pool": ("moonpool.cli.pool", "pool", "What the KVCache pool holds; check or clear a disk."),
    "bench": ("moonpool.cli.bench", "bench", "Benchmarks, each against a limit or a peer."),
}
INTERNAL = {  # started by workers, not by people
    "stage": ("moonpool.cli.stage", "stage"),
    "rank": ("moonpool.cli.rank", "rank"),
}


HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 110}


class LazyGroup(click.Group):
    """Names and one-line helps come from the table above."""

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


def main(**arguments: Any) -> None:
    cli(**arguments)
