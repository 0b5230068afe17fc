"""`moonpool replay` measures a live server, and `moonpool compare` compares it with a
simulation."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
import msgspec

from moonpool.cli.figures import replay_lines
from moonpool.cli.help_screen import ScreenHelp
from moonpool.cli.inputs import read_text, report_skipped
from moonpool.cli.options import (
    COUNT,
    POSITIVE,
    SloClassType,
    json_option,
    requests_option,
    scale_option,
    trace_format_option,
    trace_option,
)
from moonpool.cli.output import check_folders, fail, write_json
from moonpool.cli.progress import progress
from moonpool.cli.server.address import Server, asks_server
from moonpool.config.slo import SloClass
from moonpool.studies.trace_rows import named_trace
from moonpool.types import MALFORMED
from moonpool_lab.cli.prompt_options import prompt_options

if TYPE_CHECKING:
    from moonpool_lab.replay.run import ReplayPlan


@click.command(
    cls=ScreenHelp,
    screen=(
        "--trace",
        "--speed",
        "--requests",
        "--scale-tokens",
        "--model",
        "--prompts",
        "--slo-ttft",
        "--slo-tbt",
        "--concurrency",
        "--timeout",
        "--seed",
        "--api-key",
        "--ca-file",
        "--json",
    ),
)
@trace_option
@trace_format_option
@asks_server(former_flag="--url")
@click.option(
    "--speed",
    type=POSITIVE,
    default=1.0,
    show_default=True,
    help="Replay the trace this many times faster.",
)
@requests_option
@scale_option
@prompt_options
@click.option(
    "--slo-ttft",
    "slo_ttft_s",
    type=POSITIVE,
    help="Service level for the time to first token, in seconds; the server's unless given.",
)
@click.option(
    "--slo-tbt",
    "slo_tbt_s",
    type=POSITIVE,
    help="Service level for the time between tokens, in seconds; the server's unless given.",
)
@click.option(
    "--slo-class",
    "slo_classes",
    type=SloClassType(),
    multiple=True,
    metavar="NAME=TTFT,TBT",
    help="Service levels of the rows that name this class, or whose tenant has this name.",
)
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Send a rejected request again after Retry-After, at most this many times.",
)
@click.option(
    "--concurrency",
    type=COUNT,
    default=1024,
    show_default=True,
    help="Most requests in flight.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=POSITIVE,
    default=600.0,
    show_default=True,
    help="Most seconds for one answer.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of the tokens of the prompts."
)
@json_option
def replay(
    server: Server,
    prompts: str,
    slo_classes: tuple[dict[str, Any], ...],
    json_file: str | None,
    **given: Any,
) -> None:
    """Send a trace to a live OpenAI-compatible server: moonpool, vLLM or another.

    Requests are sent at the trace's times, however slow the answers are. Prompts share prefixes
    exactly as the trace's hash ids do. SLOs are the server's own unless flags state them; stated
    SLOs are also sent to a moonpool server. Ctrl-C ends the run and prints the figures so far.
    """
    from moonpool_lab.cli.client_run import run_client
    from moonpool_lab.replay.run import ReplayPlan

    check_folders(json_file)
    plan = ReplayPlan(
        url=server.url,
        api_key=server.api_key,
        ca_file=server.ca_file,
        as_text=prompts == "text",
        slo_classes=tuple(SloClass(**one) for one in slo_classes),
        **given,
    )
    figures = run_client(_replay(plan))
    figures["run"] = named_trace(plan.trace_file) | {
        "speed": plan.speed,
        "requests": plan.requests,
        "scale_tokens": str(plan.scale),
        "retries": plan.retries,
    }
    write_json(json_file, figures)
    for name, text in replay_lines(figures):
        click.echo(f"{name:<12} {text}")
    if figures["failed"] and not figures["completed"]:
        fail(f"no request succeeded; {next(iter(figures['errors']), 'none was sent')}")


async def _replay(plan: ReplayPlan) -> dict[str, Any]:
    from moonpool_lab.replay.run import run_replay

    loop = asyncio.get_running_loop()

    def on_ready(stop: Callable[[], None]) -> None:
        loop.add_signal_handler(signal.SIGINT, stop)

    with progress("replaying") as show:
        return await run_replay(plan, on_ready, show, report_skipped)


@click.command()
@click.argument("simulated_file", type=click.Path())
@click.argument("live_file", type=click.Path())
@json_option
def compare(simulated_file: str, live_file: str, json_file: str | None) -> None:
    """Compare the figures of `simulate --json` with those of `replay --json`.

    Both runs must have served the same requests of the same trace, at the same speed, with the same
    SLOs and seed. Mean and P90 of TTFT and TBT must lie within 15 % of each other, rejections
    within 10 % or 5 requests. Ends with status 1 otherwise.
    """
    from moonpool.studies.run_inputs import different_inputs
    from moonpool_lab.replay.comparison import compare as compared

    check_folders(json_file)
    simulated, live = _read_figures(simulated_file), _read_figures(live_file)
    try:
        differing = different_inputs(simulated, live)
        if differing:
            fail(f"these runs are not comparable: {', '.join(differing)}")
        comparison = compared(simulated, live)
    except (KeyError, TypeError) as error:
        fail(f"one of the files is no result of `simulate --json` or `replay --json`: no {error}")
    for line in comparison.lines():
        click.echo(line)
    write_json(json_file, msgspec.to_builtins(comparison) | {"passes": comparison.passes})
    if not comparison.passes:
        raise SystemExit(1)


def _read_figures(path: str) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(read_text(path, "the figures"))
    except MALFORMED as error:
        fail(f"{path} is not JSON: {error}; give a file of `simulate --json` or `replay --json`")
    if not isinstance(found, dict):
        fail(f"{path} holds no figures; give a file of `simulate --json` or `replay --json`")
    return found
