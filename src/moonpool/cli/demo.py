"""`moonpool demo`: the whole path of a request on a local cluster.

Two clusters of real processes, one after the other, answer the same conversations over HTTP: one
reuses KVCache, the other does not. Every answer is checked; a wrong one fails the demo.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import click
import httpx
from rich.console import Console
from rich.table import Table

from moonpool.cli.options import json_option
from moonpool.cli.output import fail, write_json
from moonpool.demo.client import ClientResponse, CompletionClient
from moonpool.demo.local_server import LocalServer, ServerError, is_alive
from moonpool.demo.workload import Conversation, ConversationTurn, make_conversations

MIN_COLUMNS = 110  # of the tables; a file has no width of its own
COLUMNS = ("turn", "user", "asked", "right", "TTFT ms", "TBT ms", "prompt", "cached", "fetched")
STAGES = ("queue_and_fetch", "prefill", "handover", "decode")


@dataclass(slots=True)
class AnsweredTurn:
    """The answer to one turn of one user."""

    turn: int
    user: str
    what: str
    answer: ClientResponse
    right: bool
    explained: dict[str, Any]

    @property
    def tbt_s(self) -> float:
        """Mean gap between tokens as they left the decode instance.

        The client cannot see it: the text of a token that may begin the stop string is held back.
        """
        return float(self.explained["observed"]["tpot_s"] or 0.0)


@dataclass(slots=True)
class DemoRun:
    """All turns of one cluster, and its times."""

    cached: bool
    start_s: float = 0.0
    wall_s: float = 0.0
    rows: list[AnsweredTurn] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return sum(row.answer.prompt_tokens for row in self.rows)

    @property
    def cached_tokens(self) -> int:
        return sum(row.answer.cached_tokens for row in self.rows)

    @property
    def fetched_tokens(self) -> int:
        return sum(row.explained["fetched_tokens"] for row in self.rows)

    @property
    def mean_ttft_s(self) -> float:
        return statistics.fmean(row.answer.ttft_s for row in self.rows)

    @property
    def mean_tbt_s(self) -> float:
        return statistics.fmean(row.tbt_s for row in self.rows)

    def mean_stage_s(self, stage: str) -> float:
        return statistics.fmean(row.explained["stages_s"].get(stage, 0.0) for row in self.rows)


@click.command()
@click.option(
    "--users", default=3, show_default=True, help="Number of conversations at the same time."
)
@click.option("--turns", default=4, show_default=True, help="Number of turns of each conversation.")
@click.option("--prefill", default=2, show_default=True, help="Number of prefill instances.")
@click.option("--decode", default=2, show_default=True, help="Number of decode instances.")
@json_option
def demo(users: int, turns: int, prefill: int, decode: int, json_file: str | None) -> None:
    """Let a local prefill/decode cluster answer multi-turn conversations with a shared prefix."""
    if min(users, turns, prefill, decode) < 1:
        fail("--users, --turns, --prefill and --decode must be at least 1")
    console = Console(highlight=False, width=max(Console().width, MIN_COLUMNS))
    instances = ["--prefill", str(prefill), "--decode", str(decode), "--kv-tokens", "32768"]
    runs = []
    for cached in (True, False):
        cache_flag = "--enable-prefix-caching" if cached else "--no-enable-prefix-caching"
        try:
            run = _run(console, [*instances, cache_flag], cached, users, turns)
        except ServerError as error:
            fail(str(error))
        except httpx.HTTPError as error:
            fail(f"the server failed: {type(error).__name__}: {error}")
        runs.append(run)
    _print_totals(console, *runs)
    write_json(json_file, _figures(*runs))
    wrong = [row for run in runs for row in run.rows if not row.right]
    if wrong:
        fail(f"{len(wrong)} answers were wrong; the first: {wrong[0].what}")


def _run(console: Console, arguments: list[str], cached: bool, users: int, turns: int) -> DemoRun:
    state = "on" if cached else "off"
    console.rule(f"cache {state}: 1 head and its workers, as processes of their own")
    run = DemoRun(cached)
    began_s = time.perf_counter()
    with LocalServer(arguments) as server:
        run.start_s = time.perf_counter() - began_s
        pids = server.worker_pids()
        console.print(
            f"up after {run.start_s:.1f} s at {server.url}: head {server.pid}, workers {pids}"
        )
        arithmetic = server.instances()[0]["pool"]["arithmetic"]
        if arithmetic.startswith("torch"):
            console.print("no native kernels here (was a C++ compiler found?): plain torch, slower")
        talks = make_conversations(users, turns, num_berths=150, seed=7)
        began_s = time.perf_counter()
        asyncio.run(_converse(console, server.url, talks, run))
        run.wall_s = time.perf_counter() - began_s
    left = [pid for pid in pids if is_alive(pid)]
    if left:
        raise ServerError(f"processes {left} were left behind")
    _print_turns(console, run)
    return run


async def _converse(console: Console, url: str, talks: list[Conversation], run: DemoRun) -> None:
    """Sends each turn of all users at once, and shows the first user's answer as it streams in."""
    client = CompletionClient(url)
    for turn in range(len(talks[0].turns)):
        shown = talks[0]
        if run.cached:
            console.print(f"[dim]turn {turn + 1}, {shown.user}:[/] ", end="")
            console.print(shown.turns[turn].question, end="", markup=False)
        answers = await asyncio.gather(
            *(_ask(client, t, t.turns[turn], show=run.cached and t is shown) for t in talks)
        )
        if run.cached:
            console.print()
        for talk, answer in zip(talks, answers, strict=True):
            done = talk.turns[turn]
            right = not answer.error and answer.text == done.expected
            explained = await client.explain(answer.request_id)
            run.rows.append(AnsweredTurn(turn + 1, talk.user, done.what, answer, right, explained))
            talk.text += done.question + answer.text + (done.stop or "") + "\n"
    await client.close()


async def _ask(
    client: CompletionClient, talk: Conversation, turn: ConversationTurn, show: bool
) -> ClientResponse:
    def on_text(text: str) -> None:
        if show:
            sys.stdout.write(text)
            sys.stdout.flush()

    tokens = len(turn.expected) if turn.stop is None else 48
    stop = {} if turn.stop is None else {"stop": turn.stop}
    return await client.complete(
        talk.text + turn.question, on_text, temperature=0, max_tokens=tokens, **stop
    )


def _print_turns(console: Console, run: DemoRun) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("user", "asked") else "right")
    table.add_column("prefill on", no_wrap=True)
    table.add_column("decode on", no_wrap=True)
    for row in run.rows:
        answer = row.answer
        table.add_row(
            str(row.turn),
            row.user,
            row.what,
            "yes" if row.right else "[red]NO[/]",
            f"{1e3 * answer.ttft_s:.1f}",
            f"{1e3 * row.tbt_s:.2f}",
            str(answer.prompt_tokens),
            str(answer.cached_tokens),
            str(row.explained["fetched_tokens"]),
            str(row.explained["prefill_instance"]),
            str(row.explained["decode_instance"]),
        )
    console.print(table)


def _print_totals(console: Console, on: DemoRun, off: DemoRun) -> None:
    console.rule("the same work, cache on and off")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "cache on", "cache off", "off / on"):
        table.add_column(name, justify="left" if not name else "right")

    def line(name: str, a: float, b: float, form: str) -> None:
        table.add_row(name, format(a, form), format(b, form), f"{b / a:.1f}x" if a else "")

    line("prompt tokens", on.prompt_tokens, off.prompt_tokens, ",.0f")
    computed = (on.prompt_tokens - on.cached_tokens, off.prompt_tokens - off.cached_tokens)
    line("  of them computed", *computed, ",.0f")
    line("  of them fetched from another instance", on.fetched_tokens, off.fetched_tokens, ",.0f")
    line("mean TTFT, ms", 1e3 * on.mean_ttft_s, 1e3 * off.mean_ttft_s, ".1f")
    line("mean TBT, ms", 1e3 * on.mean_tbt_s, 1e3 * off.mean_tbt_s, ".2f")
    for stage in STAGES:
        name = f"  mean {stage.replace('_', ' ')}, ms"
        line(name, 1e3 * on.mean_stage_s(stage), 1e3 * off.mean_stage_s(stage), ".1f")
    line("all answers, s", on.wall_s, off.wall_s, ".2f")
    console.print(table)
    rows = on.rows + off.rows
    same = all(a.answer.text == b.answer.text for a, b in zip(on.rows, off.rows, strict=True))
    console.print(
        f"{sum(row.right for row in rows)} of {len(rows)} answers right;"
        f" cache on and off gave {'the same' if same else '[red]DIFFERENT[/]'} text;"
        " every process has ended"
    )


def _figures(on: DemoRun, off: DemoRun) -> dict[str, Any]:
    def figures(run: DemoRun) -> dict[str, Any]:
        return {
            "requests": len(run.rows),
            "right": sum(row.right for row in run.rows),
            "cache": {"input_tokens": run.prompt_tokens, "hit_tokens": run.cached_tokens},
            "fetched_tokens": run.fetched_tokens,
            "ttft_s": {"mean": run.mean_ttft_s},
            "tbt_s": {"mean": run.mean_tbt_s},
            "stages_s": {stage: run.mean_stage_s(stage) for stage in STAGES},
            "wall_s": run.wall_s,
        }

    return {"cache_on": figures(on), "cache_off": figures(off)}
