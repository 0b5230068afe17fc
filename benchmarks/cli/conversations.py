"""`moonpool bench conversations`: live conversations and agents on arrangements of one machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import click

from benchmarks.cli.annotated import KeptFile, PeerPython, Seed, options
from benchmarks.cli.live import NUMBERS
from benchmarks.cli.output import measure
from moonpool.cli.output import check_folders, origin

if TYPE_CHECKING:
    from benchmarks.suite.conversations.arrangements import Machine
    from benchmarks.suite.conversations.bench import ConversationPlan


@click.command()
@options
def conversations(
    *,
    model: Annotated[str, "Folder of a checkpoint with tokeniser files."],
    peer_python: PeerPython = "",
    peer_eager: Annotated[bool, "Keep vLLM from compiling."] = False,
    peer_batched_tokens: Annotated[
        int, "Value of vLLM's --max-num-batched-tokens unless its name has one, as vllm-two:128."
    ] = 256,
    aiperf_python: Annotated[
        str, "Python of an AIPerf installation, which sends the sessions in place of our client."
    ] = "",
    workloads: Annotated[
        tuple[str, ...],
        "Sessions to play: 40 % of the prompt tokens of chats were said before, 90 % of agents.",
        "--workload",
        click.Choice(["chats", "agents"]),
    ] = ("chats", "agents"),
    compare: Annotated[
        str, "What to compare.", click.Choice(["arrangements", "placements", "admissions"])
    ] = "arrangements",
    only: Annotated[
        str,
        "Arrangements to run instead, with commas: 1P+1D, 2M/random, 2M/early, planned,"
        " vllm-two:128.",
    ] = "",
    loads: Annotated[
        Any, "Loads to run, as multiples of the capacity, which is measured first.", NUMBERS
    ] = "0.5,1,2,4",
    seconds: Annotated[float, "Seconds in which requests of one run are sent."] = 30.0,
    kv_tokens: Annotated[int, "Tokens of KVCache of all instances together."] = 65_536,
    seed: Seed = 1,
    again: Annotated[bool, "Repeat runs that the file has already."] = False,
    json_file: KeptFile = None,
) -> None:
    """Compare arrangements of moonpool and vLLM on live conversations in closed loops.

    A turn comes when the last answer has been read. Beforehand, `moonpool plan` and simulations say
    which arrangement of two instances is best. With --json, the runs can be made in parts.
    """
    from benchmarks.suite.conversations.arrangements import GROUPS, Machine
    from benchmarks.suite.conversations.bench import ConversationPlan
    from benchmarks.suite.conversations.sessions import SESSION_SHAPES

    check_folders(json_file)
    machine = Machine(
        model=model,
        kv_tokens=kv_tokens,
        peer_chunk_tokens=peer_batched_tokens,
        peer_python=peer_python,
        peer_eager=peer_eager,
    )
    plan = ConversationPlan(
        shapes=tuple(SESSION_SHAPES[name] for name in dict.fromkeys(workloads)),
        systems=tuple(only.split(",")) if only else GROUPS[compare],
        loads=tuple(sorted(loads)),
        seconds=seconds,
        seed=seed,
        again=again,
        aiperf_python=aiperf_python,
    )
    _run(machine, plan, json_file)


def _run(machine: Machine, plan: ConversationPlan, json_file: str | None) -> None:
    from benchmarks.suite.conversations.arrangements import PLANNED, parse_arrangement
    from benchmarks.suite.conversations.bench import (
        bench_conversations,
        conversation_runs,
        verdict_lines,
    )

    def run() -> dict[str, Any]:
        for name in plan.systems:
            if name != PLANNED:
                parse_arrangement(name)
        runs = conversation_runs(None if json_file is None else Path(json_file), origin())
        return bench_conversations(machine, plan, runs, click.echo)

    found = measure(run, None)
    for line in verdict_lines(found["bases"], found["rows"]):
        click.echo(line)
