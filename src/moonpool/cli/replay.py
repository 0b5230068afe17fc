"""`moonpool replay`: a trace sent to a live server, measured as the simulator measures."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import uvloop

from moonpool.cli.figures import spread
from moonpool.cli.output import COUNT, fail, write_json
from moonpool.cli.scale import check_folders, scale_option

if TYPE_CHECKING:
    from fractions import Fraction

    from moonpool.replay.run import ReplayPlan

LATE_S = 0.05
"""A client whose requests leave later than this on average did not keep up."""


@click.command()
@click.option("--trace", "trace_file", required=True, help="Mooncake, Azure or BurstGPT trace.")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server.")
@click.option(
    "--speed", type=click.FloatRange(min=0, min_open=True), default=1.0, show_default=True
)
@click.option("--requests", type=COUNT, help="Only the first so many.")
@scale_option
@click.option("--model", help="One of the server's; its first unless named.")
@click.option("--vocab", type=click.IntRange(min=2), help="Token ids to draw prompts from.")
@click.option(
    "--prompts",
    type=click.Choice(["ids", "text"]),
    default="ids",
    show_default=True,
    help="Token ids, or words for a server that takes none.",
)
@click.option("--slo-ttft", type=click.FloatRange(min=0, min_open=True), help="Seconds.")
@click.option("--slo-tbt", type=click.FloatRange(min=0, min_open=True), help="Seconds.")
@click.option(
    "--retries",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Send again after Retry-After, so often.",
)
@click.option(
    "--concurrency", type=COUNT, default=1024, show_default=True, help="Most requests under way."
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="Seconds for one answer.",
)
@click.option("--api-key", help="Bearer key; else OPENAI_API_KEY.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the prompts' tokens.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help="Write all figures.")
def replay(
    trace_file: str,
    url: str,
    speed: float,
    requests: int | None,
    scale: Fraction,
    model: str | None,
    vocab: int | None,
    prompts: str,
    slo_ttft: float | None,
    slo_tbt: float | None,
    retries: int,
    concurrency: int,
    timeout_s: float,
    api_key: str | None,
    seed: int,
    json_file: str | None,
) -> None:
    """Send a trace to a live OpenAI-compatible server: moonpool, vLLM or another.

    Requests leave by the trace's clock whatever the answers do; prompts share prefixes exactly as
    the trace's hash ids say. SLOs are the server's own unless given; a moonpool server is told
    those that are. Ctrl-C ends the run with what there is.
    """
    from moonpool.replay.run import ReplayPlan

    check_folders(json_file)
    plan = ReplayPlan(
        trace_file=trace_file,
        url=url,
        speed=speed,
        requests=requests,
        scale=scale,
        model=model,
        vocab_size=vocab,
        as_text=prompts == "text",
        slo_ttft_s=slo_ttft,
        slo_tbt_s=slo_tbt,
        retries=retries,
        concurrency=concurrency,
        timeout_s=timeout_s,
        api_key=api_key or os.environ.get("OPENAI_API_KEY", ""),
        seed=seed,
    )
    figures = _run(plan)
    figures["run"] = {
        "trace": Path(trace_file).name,
        "speed": speed,
        "requests": requests,
        "scale_tokens": str(scale),
        "retries": retries,
    }
    write_json(json_file, figures)
    for name, text in lines(figures):
        click.echo(f"{name:<12} {text}")
    if figures["failed"] and not figures["completed"]:
        fail(f"no request succeeded; {next(iter(figures['errors']), 'none was sent')}")


def _run(plan: ReplayPlan) -> dict[str, Any]:
    from moonpool.replay.player import HopelessError
    from moonpool.replay.run import run_replay
    from moonpool.replay.server import ServerUnfitError
    from moonpool.trace.row import TraceError

    async def main() -> dict[str, Any]:
        loop = asyncio.get_running_loop()

        def on_ready(stop: Callable[[], None]) -> None:
            loop.add_signal_handler(signal.SIGINT, stop)

        with _progress() as show:
            return await run_replay(plan, on_ready, show)

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(main())
    except (ServerUnfitError, HopelessError, TraceError, ValueError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


@contextmanager
def _progress() -> Iterator[Callable[[int, int], None]]:
    """On a terminal, a bar of ended requests."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("replaying", total=None)
        last_s = 0.0

        def show(done: int, total: int) -> None:
            nonlocal last_s
            if time.monotonic() - last_s > 0.2:  # drawing is not free
                last_s = time.monotonic()
                progress.update(task, completed=done, total=total)

        yield show


def lines(figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """For people; `--json` has all of it."""
    slo, cache, client = figures["slo"], figures["cache"], figures["client"]
    cut = " (interrupted)" if figures["interrupted"] else ""
    yield "requests", f"{figures['requests']:,} in {figures['simulated_s']:,.1f} s{cut}"
    share = f"{figures['effective']:,} ({figures['effective_share']:.1%})"
    text = f"within TTFT {slo['ttft_s']:g} s and TBT {slo['tbt_s']:g} s"
    yield "effective", f"{share} {text}: {figures['goodput_rps']:.3f} requests/s"
    reasons = ", ".join(f"{n} {reason}" for reason, n in figures["rejected_by_reason"].items())
    resent = f"; {figures['resent']:,} sent again" if figures["resent"] else ""
    yield "rejected", f"{figures['rejected']:,}" + (f" ({reasons})" if reasons else "") + resent
    unfinished = f", {figures['unfinished']:,} given up" if figures["unfinished"] else ""
    yield "failed", f"{figures['failed']:,}{unfinished}"
    for error, number in figures["errors"].items():
        yield "", f"{number} x {error[:160]}"
    yield "TTFT", spread(figures["ttft_s"], 1.0, "s")
    yield "TBT", spread(figures["tbt_s"], 1e3, "ms") + " (each gap)"
    yield "", spread(figures["tbt_top10_mean_s"], 1e3, "ms") + " (longest tenth of a request)"
    yield "cache", f"{cache['hit_ratio']:.1%} of {cache['input_tokens']:,} prompt tokens"
    cost = f"{client['cpu_us_per_token']:.0f} us of CPU per token"
    late = client["late_s"]
    yield (
        "client",
        f"{cost}; requests left {late['mean'] * 1e3:.1f} ms late (most {late['max']:.2g} s)",
    )
    if client["delayed"] or late["mean"] > LATE_S:
        yield (
            "",
            (
                f"this client did not keep up: {client['delayed']:,} requests waited for one of its"
                " slots; raise --concurrency, or give it a core of its own"
            ),
        )
