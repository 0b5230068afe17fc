"""`moonpool trial`: looks for wrong answers of OpenAI-compatible servers."""

from __future__ import annotations

import secrets
from typing import Any

import click

from moonpool.cli.help_screen import ScreenHelp
from moonpool.cli.options import COUNT, POSITIVE, json_option
from moonpool.cli.output import check_folders, fail, need_package, one_line, origin, write_json
from moonpool.cli.progress import progress
from moonpool.cli.server.address import KEYS_FOR_ANYBODY, SERVER_URL, access_options

STATUS_BROKEN = 3
ROWS = (
    ("answers compared, quiet", "quiet", "answered"),
    ("answers compared, load", "load", "answered"),
    ("differ in quiet", "quiet", "differing"),
    ("differ under load", "load", "differing"),
)
KINDS = ("near_tie", "wrong", "missing", "doubled", "unclear")
TOKENS = ("wrong_tokens", "missing_tokens", "doubled_tokens")
FAILED = ("refused", "error", "cut", "hung")


@click.command(
    cls=ScreenHelp,
    screen=(
        "--model",
        "--api",
        "--requests",
        "--concurrency",
        "--time-limit",
        "--families",
        "--repeats",
        "--max-tokens",
        "--restart-command",
        "--timeout",
        "--api-key",
        "--seed",
        "--json",
    ),
)
@click.argument("urls", type=SERVER_URL, nargs=-1, required=True, metavar="URL...")
@click.option("--model", help="Model to request; each server's first unless given.")
@click.option(
    "--api",
    type=click.Choice(["both", "chat", "completions"]),
    default="both",
    show_default=True,
    help="Routes that requests are sent to.",
)
@click.option(
    "--requests", type=COUNT, default=400, show_default=True, help="Questions asked under load."
)
@click.option(
    "--concurrency", type=COUNT, default=16, show_default=True, help="Requests in flight."
)
@click.option(
    "--time-limit",
    "--seconds",
    "seconds",
    type=POSITIVE,
    default=600.0,
    show_default=True,
    help="Most seconds of load.",
)
@click.option(
    "--families",
    type=COUNT,
    default=6,
    show_default=True,
    help="Families of conversations: three forks of one text, two turns each.",
)
@click.option(
    "--repeats",
    type=click.IntRange(min=2),
    default=3,
    show_default=True,
    help="Ask each question this many times in quiet before the load.",
)
@click.option("--max-tokens", type=COUNT, default=48, show_default=True, help="Length of answers.")
@click.option(
    "--fill-words",
    type=click.IntRange(min=0),
    default=4000,
    show_default=True,
    help="Words of other prompts per round of questions, to provoke evictions.",
)
@click.option(
    "--tie-nats",
    type=POSITIVE,
    default=0.5,
    show_default=True,
    help="Tokens whose logprobs are closer than this are a near-tie: rounding may flip it.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=POSITIVE,
    default=60.0,
    show_default=True,
    help="Most seconds for one answer; a longer one is a hang.",
)
@click.option(
    "--may-reset-cache",
    "may_reset",
    is_flag=True,
    help="Reset the prefix cache in the middle (POST /reset_prefix_cache or /flush_cache).",
)
@click.option(
    "--restart-command",
    help="Restart the server in the middle with this command, which no shell reads.",
)
@access_options(KEYS_FOR_ANYBODY)
@click.option("--seed", type=int, help="Seed of the prompts; drawn, and shown, unless given.")
@json_option
def trial(
    urls: tuple[str, ...], api: str, restart_command: str | None, seed: int | None, **given: Any
) -> None:
    """Look for wrong answers of OpenAI-compatible servers: moonpool, vLLM or another.

    Sends conversations with planted codes, first one by one, then under load with shared and forked
    prefixes, evictions, and clients that disconnect. Each greedy answer is compared with what the
    same server answered without load. Near-ties, which rounding may flip, are counted apart.

    Ends with status 1 if wrong answers are proven, and with 3 if answers were cut or hung.
    """
    from moonpool_lab.trial.disturbances import DisturbanceError, parse_command

    json_file = given.pop("json_file")
    check_folders(json_file)
    need_package("scipy")
    if restart_command is not None and len(urls) > 1:
        fail("--restart-command restarts one server: give one URL")
    with one_line(DisturbanceError):
        command = tuple(parse_command(restart_command)) if restart_command is not None else ()
    seed = seed if seed is not None else secrets.randbelow(1 << 31)
    found = [_try_one(url, seed=seed, api=api, restart_command=command, **given) for url in urls]
    write_json(json_file, {"servers": found, "origin": origin()})
    for line in _table(found):
        click.echo(line)
    click.echo(f"seed {seed}")
    for figures in found:
        for line in _verdict(figures):
            click.echo(line)
    if any(figures["proven"] for figures in found):
        raise SystemExit(1)
    if any(_broken(figures) for figures in found):
        raise SystemExit(STATUS_BROKEN)


def _try_one(url: str, *, api: str, **given: Any) -> dict[str, Any]:
    from moonpool_lab.cli.client_run import run_client
    from moonpool_lab.trial.run import PATHS, TrialPlan, run_trial

    plan = TrialPlan(url=url, apis=tuple(PATHS) if api == "both" else (api,), **given)
    with progress(f"trying {url}") as show:
        return run_client(run_trial(plan, show))


def trial_lines(found: list[dict[str, Any]]) -> list[str]:
    """Returns a table of the figures of several servers, and a verdict on each server."""
    return [*_table(found), *(line for figures in found for line in _verdict(figures))]


def _table(found: list[dict[str, Any]]) -> list[str]:
    rows: list[tuple[str, list[str]]] = [("", [figures["url"] for figures in found])]
    rows.append(("model", [figures["model"] for figures in found]))
    for label, phase, key in ROWS:
        rows.append((label, [str(figures[phase][key]) for figures in found]))
    for kind in KINDS:
        label = f"  {kind.replace('_', '-')}, quiet + load"
        rows.append((label, [_sum(figures, "kinds", kind) for figures in found]))
    for key in TOKENS:
        label = f"{key.replace('_', ' ')}"
        counts = (figures["quiet"][key] + figures["load"][key] for figures in found)
        rows.append((label, [str(count) for count in counts]))
    rows.append(("answers with foreign text", [_plain_sum(f, "foreign") for f in found]))
    rows.append(("planted codes lost, load", [_lost(figures) for figures in found]))
    for kind in FAILED:
        rows.append((f"{kind}, quiet + load", [_sum(f, "failed", kind) for f in found]))
    rows.append(("cached prompt tokens, load", [_cached(figures) for figures in found]))
    rows.append(("p: load changes answers", [f"{f['p_differs']:.3g}" for f in found]))
    rows.append(("p: no near-tie explains", [f"{f['p_unexplained']:.3g}" for f in found]))
    rows.append(("p: codes lost by load", [f"{f['p_facts_lost']:.3g}" for f in found]))
    widths = [max(len(cells[n]) for _, cells in rows) for n in range(len(found))]
    return [
        f"{label:<28}"
        + "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        for label, cells in rows
    ]


def _sum(figures: dict[str, Any], group: str, key: str) -> str:
    return " + ".join(str(figures[phase][group].get(key, 0)) for phase in ("quiet", "load"))


def _plain_sum(figures: dict[str, Any], key: str) -> str:
    return str(figures["quiet"][key] + figures["load"][key])


def _lost(figures: dict[str, Any]) -> str:
    return f"{figures['load']['facts_lost']} of {figures['load']['facts']}"


def _cached(figures: dict[str, Any]) -> str:
    load = figures["load"]
    share = load["cached_tokens"] / load["prompt_tokens"] if load["prompt_tokens"] else 0.0
    return f"{share:.0%}"


def _broken(figures: dict[str, Any]) -> int:
    return sum(figures[p]["failed"].get(k, 0) for p in ("quiet", "load") for k in ("cut", "hung"))


def _verdict(figures: dict[str, Any]) -> list[str]:
    url = figures["url"]
    lines = []
    if figures["disturbances"]:
        done = ", ".join(f"{count} {name}" for name, count in figures["disturbances"].items())
        lines.append(f"{url}: disturbed by {done}")
    if figures["proven"]:
        lines.append(f"{url}: WRONG ANSWERS: {'; '.join(figures['proven'])}")
        example = next((e for e in figures["examples"] if e["reference"] is not None), None)
        if example is not None:
            lines.append(f"  {example['question']}, {example['why']}: {example['answer']!r}")
            lines.append(f"  in place of {example['reference']!r}")
    elif unexplained := figures["quiet"]["unexplained"] + figures["load"]["unexplained"]:
        lines.append(f"{url}: {unexplained} unexplained differences prove nothing yet; ask more")
    else:
        lines.append(f"{url}: no wrong answer found")
    if not figures["references_with_logprobs"]:
        lines.append(f"{url}: it gives no logprobs, so near-ties and wrong tokens look alike")
    if broken := _broken(figures):
        lines.append(f"{url}: {broken} answers were cut or hung")
    return lines
