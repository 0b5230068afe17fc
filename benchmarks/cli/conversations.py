"""`moonpool bench conversations`: live conversations and agents on arrangements of one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from benchmarks.cli.live import NUMBERS
from moonpool.cli.options import COUNT
from moonpool.cli.output import check_folders, fail, origin, run_measurement

_POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command()
@click.option("--model", required=True, help="Folder of a checkpoint with tokeniser files.")
@click.option("--peer-python", default="", help="Python of a vLLM installation.")
@click.option("--peer-eager", is_flag=True, help="Keep vLLM from compiling.")
@click.option(
    "--peer-batched-tokens",
    type=COUNT,
    default=256,
    show_default=True,
    help="Value of vLLM's --max-num-batched-tokens unless its name has one, as vllm-two:128.",
)
@click.option(
    "--workload",
    "workloads",
    multiple=True,
    type=click.Choice(["chats", "agents"]),
    default=("chats", "agents"),
    show_default=True,
    help="Sessions to play: 40 % of the prompt tokens of chats were said before, 90 % of agents.",
)
@click.option(
    "--compare",
    type=click.Choice(["arrangements", "placements", "admissions"]),
    default="arrangements",
    show_default=True,
    help="What to compare.",
)
@click.option(
    "--only",
    default="",
    help="Arrangements to run instead, with commas: 1P+1D, 2M/random, 2M/early, planned,"
    " vllm-two:128.",
)
@click.option(
    "--loads",
    type=NUMBERS,
    default="0.5,1,2,4",
    show_default=True,
    help="Loads to run, as multiples of the capacity, which is measured first.",
)
@click.option(
    "--seconds",
    type=_POSITIVE,
    default=30.0,
    show_default=True,
    help="Seconds in which requests of one run are sent.",
)
@click.option(
    "--kv-tokens",
    type=COUNT,
    default=65_536,
    show_default=True,
    help="Tokens of KVCache of all instances together.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="Seed of all random choices.")
@click.option("--again", is_flag=True, help="Repeat runs that the file has already.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(dir_okay=False),
    help="Keep all runs in this file; a later command adds to it.",
)
def conversations(
    model: str,
    workloads: tuple[str, ...],
    compare: str,
    only: str,
    loads: tuple[float, ...],
    seconds: float,
    seed: int,
    again: bool,
    json_file: str | None,
    **flags: Any,
) -> None:
    """Compare arrangements of moonpool and vLLM on live conversations in closed loops.

    A turn comes when the last answer has been read. Beforehand, `moonpool plan` and simulations say
    which arrangement of two instances is best. With --json, the runs can be made in parts.
    """
    from benchmarks.suite.conversations.arrangements import (
        GROUPS,
        PLANNED,
        Machine,
        parse_arrangement,
    )
    from benchmarks.suite.conversations.bench import (
        ConversationPlan,
        ConversationRuns,
        ConversationsFileError,
        bench_conversations,
        verdict_lines,
    )
    from benchmarks.suite.conversations.sessions import SESSION_SHAPES
    from moonpool.config import ConfigError

    check_folders(json_file)
    systems = tuple(only.split(",")) if only else GROUPS[compare]
    machine = Machine(
        model=model,
        kv_tokens=flags["kv_tokens"],
        peer_chunk_tokens=flags["peer_batched_tokens"],
        peer_python=flags["peer_python"],
        peer_eager=flags["peer_eager"],
    )
    plan = ConversationPlan(
        shapes=tuple(SESSION_SHAPES[name] for name in dict.fromkeys(workloads)),
        systems=systems,
        loads=tuple(sorted(loads)),
        seconds=seconds,
        seed=seed,
        origin=origin(),
        again=again,
    )
    try:
        for name in systems:
            if name != PLANNED:
                parse_arrangement(name)
        runs = ConversationRuns(None if json_file is None else Path(json_file))
        found = run_measurement(lambda: bench_conversations(machine, plan, runs, click.echo), None)
    except (ConfigError, ConversationsFileError) as error:
        fail(str(error))
    for line in verdict_lines(found["bases"], found["rows"]):
        click.echo(line)
