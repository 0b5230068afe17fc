"""`moonpool demo`: the whole path of a request on a local cluster.

Two clusters of real processes, one after the other, answer the same conversations over HTTP. The
first cluster reuses KVCache: blocks come from other instances and from SSDs, and an instance is
killed in the middle of an answer. The second cluster reuses no KVCache, and answers the last half
of the turns. Every answer is checked; a wrong one fails the demo. At the end, a page shows what
happened.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
import time
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from moonpool.cli.options import json_option
from moonpool.cli.output import check_folders, fail, write_json, write_page
from moonpool.http_client.client import ConnectionFailedError
from moonpool.plugins.engines import need_engine
from moonpool_lab.demo.answers import COLUMNS, TEXTS, DemoRun
from moonpool_lab.demo.client import CompletionClient
from moonpool_lab.demo.events import ask, fill_memory, kill_in_an_answer
from moonpool_lab.demo.local_server import LocalServer, ServerError, is_alive
from moonpool_lab.demo.page import render_page
from moonpool_lab.demo.workload import Conversation, make_conversations

MIN_COLUMNS = 118  # width of the tables if the output goes to a file
STAGES = ("queue_and_fetch", "prefill", "handover", "decode")
KV_TOKENS_PER_USER = 6144
"""KVCache tokens of an instance for each conversation that it decodes: few, so that the memory
fills up."""
NEXT_STEPS = (
    ("serve an OpenAI-compatible API on http://127.0.0.1:8000", "serve"),
    ("put it in front of a vLLM that runs already", "serve --vllm http://127.0.0.1:8100"),
    (
        "ask what a cluster of A800s would do",
        (
            "trace generate --requests 1000 -o trace.jsonl && {} simulate --trace trace.jsonl"
            " --report report.html"
        ),
    ),
)


@click.command()
@click.option(
    "--users", default=3, show_default=True, help="Number of conversations at the same time."
)
@click.option("--turns", default=4, show_default=True, help="Number of turns of each conversation.")
@click.option("--prefill", default=2, show_default=True, help="Number of prefill instances.")
@click.option("--decode", default=2, show_default=True, help="Number of decode instances.")
@click.option(
    "--report",
    "--page",
    "page_file",
    type=click.Path(dir_okay=False),
    default="demo.html",
    show_default=True,
    help="Write an HTML page about the run to this file.",
)
@json_option
def demo(
    users: int, turns: int, prefill: int, decode: int, page_file: str, json_file: str | None
) -> None:
    """Start a small cluster on this machine and show what its KVCache saves.

    Conversations that begin alike are answered with the cache on and then off, and each answer is
    checked. Nothing is downloaded: a built-in model looks up what its prompts say.
    """
    if min(users, turns, prefill, decode) < 1:
        fail("--users, --turns, --prefill and --decode must be at least 1")
    check_folders(page_file, json_file)
    need_engine()  # checked before any process starts
    console = Console(highlight=False, width=max(Console().width, MIN_COLUMNS))
    kv_tokens = KV_TOKENS_PER_USER * -(-users // decode)
    instances = ["--prefill", str(prefill), "--decode", str(decode), "--kv-tokens", str(kv_tokens)]
    runs = []
    for cached in (True, False):
        try:
            with tempfile.TemporaryDirectory() as folder:
                ssd = ["--ssd-tokens", str(8 * kv_tokens), "--ssd-folder", folder]
                flags = ssd if cached else ["--no-enable-prefix-caching"]
                run = _run(console, [*instances, *flags], cached, users, turns)
        except ServerError as error:
            fail(str(error))
        except ConnectionFailedError as error:
            fail(f"the server failed: {error}")
        runs.append(run)
    _print_totals(console, *runs)
    write_json(json_file, _figures(*runs))
    write_page(page_file, render_page(*runs))
    _print_next_steps(console, page_file)
    wrong = [row for run in runs for row in run.wrong]
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
        first = 0 if cached else turns // 2
        asyncio.run(_converse(console, server.url, talks, run, first))
        pids += server.worker_pids()
    left = [pid for pid in pids if is_alive(pid)]
    if left:
        raise ServerError(f"processes {left} were left behind")
    _print_turns(console, run)
    return run


async def _converse(
    console: Console, url: str, talks: list[Conversation], run: DemoRun, first: int
) -> None:
    """Sends each turn of all users at once, and shows the first user's answer as it streams in.

    Turns before `first` count as asked and answered correctly.
    """
    client = CompletionClient(url)
    for talk in talks:
        talk.skip(first)
    for turn in range(first, len(talks[0].turns)):
        began_s = time.perf_counter()
        shown = talks[0]
        if run.cached:
            console.print(f"[dim]turn {turn + 1}, {shown.user}:[/] ", end="")
            console.print(shown.turns[turn].question[-60:], end="", markup=False)
        run.rows += await asyncio.gather(
            *(
                ask(client, t, t.turns[turn], _show if run.cached and t is shown else None)
                for t in talks
            )
        )
        run.turns_s.append(time.perf_counter() - began_s)
        if run.cached:
            console.print()
    if run.cached:
        run.events.append(await fill_memory(client, talks[-1], run.after))
        console.print(f"[dim]an instance is killed while {talks[0].user} reads:[/] ", end="")
        run.events.append(await kill_in_an_answer(client, talks[0], run.after, _show))
        console.print()
    client.close()


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _print_turns(console: Console, run: DemoRun) -> None:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in TEXTS else "right", no_wrap=name in TEXTS)
    for row in run.rows + run.after:
        table.add_row(*row.cells)
    console.print(table)
    for event in run.events:
        console.print(f"[bold]{event.title}[/]: {event.text}")


def _print_totals(console: Console, on: DemoRun, off: DemoRun) -> None:
    whole, on = on, on.last(len(off.turns_s))
    console.rule(f"the last {len(off.rows)} answers, cache on and off")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("", "cache on", "cache off", "off / on"):
        table.add_column(name, justify="left" if not name else "right")

    def line(name: str, a: float, b: float, form: str) -> None:
        table.add_row(name, format(a, form), format(b, form), f"{b / a:.1f}x" if a else "")

    line("prompt tokens", on.prompt_tokens, off.prompt_tokens, ",.0f")
    computed = (on.prompt_tokens - on.cached_tokens, off.prompt_tokens - off.cached_tokens)
    line("  of them computed", *computed, ",.0f")
    line("mean TTFT, ms", 1e3 * on.mean_ttft_s, 1e3 * off.mean_ttft_s, ".1f")
    line("mean TBT, ms", 1e3 * on.mean_tbt_s, 1e3 * off.mean_tbt_s, ".2f")
    for stage in STAGES:
        name = f"  mean {stage.replace('_', ' ')}, ms"
        line(name, 1e3 * on.mean_stage_s(stage), 1e3 * off.mean_stage_s(stage), ".1f")
    line("all answers, s", on.wall_s, off.wall_s, ".2f")
    console.print(table)
    rows = whole.rows + whole.after + off.rows
    same = all(a.answer.text == b.answer.text for a, b in zip(on.rows, off.rows, strict=True))
    console.print(
        f"{whole.fetched_tokens:,} tokens of KVCache came from another instance,"
        f" {whole.loaded_tokens:,} from an SSD"
    )
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
            "loaded_tokens": run.loaded_tokens,
            "events": {event.title: event.text for event in run.events},
            "ttft_s": {"mean": run.mean_ttft_s},
            "tbt_s": {"mean": run.mean_tbt_s},
            "stages_s": {stage: run.mean_stage_s(stage) for stage in STAGES},
            "wall_s": run.wall_s,
        }

    return {"cache_on": figures(on), "cache_off": figures(off)}


def _print_next_steps(console: Console, page_file: str) -> None:
    command = "moonpool" if shutil.which("moonpool") else sys.argv[0]
    console.rule("next steps")
    for what, arguments in NEXT_STEPS:
        console.print(f"[dim]{what}:[/]")
        line = f"  {command} {arguments.format(command)}"
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"[dim]what just happened, as a page:[/] {page_file}")
