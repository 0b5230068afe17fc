"""`moonpool trace info | generate | download`: inspects, generates and downloads workloads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.progress import DownloadColumn
from rich.table import Table

from moonpool.cli.main import SuggestingGroup
from moonpool.cli.options import COUNT, POSITIVE, json_option
from moonpool.cli.output import check_folders, fail, one_line, write_json, writing
from moonpool.cli.progress import follow, progress
from moonpool.plugins.entry_points import plot_function
from moonpool.trace.builtin import BUILT_IN, BUILT_IN_MIXES
from moonpool.trace.profile import GeneratorProfile, read_profile
from moonpool.trace.profile import write_profile as save_profile
from moonpool.trace.reader import open_trace
from moonpool.trace.row import TraceError, TraceInfo
from moonpool.trace.statistics import (
    Blocks,
    Distribution,
    Lengths,
    TraceFigures,
    TraceStatistics,
    Turns,
)


@click.group(cls=SuggestingGroup)
def trace() -> None:
    """Inspect, generate and download workloads."""


@trace.command()
@click.argument("file", type=click.Path())
@click.option(
    "--format",
    "--trace-format",
    "format_name",
    default="auto",
    show_default=True,
    metavar="[mooncake|bailian|azure|burstgpt|vidur|log|vllm|MODULE:NAME]",
    help="Format of the file; a parser of your own as MODULE:NAME.",
)
@json_option
@click.option("--plot", type=click.Path(dir_okay=False), help="Draw the figures to this PNG file.")
def info(file: str, format_name: str, json_file: str | None, plot: str | None) -> None:
    """Describe a trace.

    Prints its load, lengths, arrivals, shared prefixes and turns.
    """
    check_folders(json_file, plot)
    draw = None if plot is None else plot_function("trace")
    with one_line(TraceError):
        rows = open_trace(file, format=format_name, spread_ticks=False)
        character = TraceStatistics(rows.info.block_tokens)
        for row in follow(rows, rows.info.num_rows, "reading"):
            character.add(row)
        figures = character.figures()
    _print_figures(rows.info, figures)
    write_json(json_file, {"file": msgspec.to_builtins(rows.info)} | _plain(figures))
    if plot is not None and draw is not None:
        name = Path(file).name
        rate = f"{figures.requests:,} requests in {figures.duration_s:,.0f} s"
        with writing(plot):
            draw(character, f"{name}: {rate}", Path(plot))
        click.echo(f"wrote {plot}")


@trace.command()
@click.option(
    "--profile",
    "profile_name",
    help="Kind of workload, or the file of a profile; conversation unless given. Kinds:"
    f" {', '.join((*BUILT_IN, *BUILT_IN_MIXES))}.",
)
@click.option("--like", type=click.Path(), help="Fit the workload to this trace.")
@click.option("--requests", type=COUNT, help="Number of requests.")
@click.option(
    "--duration",
    type=POSITIVE,
    help="Most seconds of the trace, instead of --requests or in addition.",
)
@click.option("--rate", type=POSITIVE, help="Requests per second; the profile's unless given.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of all random choices.")
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False),
    required=True,
    help="Write the trace to this file.",
)
@click.option(
    "--write-profile", type=click.Path(dir_okay=False), help="Write the profile to this file, too."
)
def generate(
    profile_name: str | None,
    like: str | None,
    requests: int | None,
    duration: float | None,
    rate: float | None,
    seed: int,
    output: str,
    write_profile: str | None,
) -> None:
    """Generate a trace in Mooncake's format.

    The trace has sessions, shared prompts, tools and bursts.
    """
    from moonpool.trace.generate import generate as generated
    from moonpool.trace.generate import generate_mix
    from moonpool.trace.jsonl import write_trace

    if requests is None and duration is None:
        fail("the length of the trace is missing: give --requests N or --duration SECONDS")
    if profile_name is not None and like is not None:
        fail("--profile and --like exclude each other: give one of them")
    with one_line(TraceError):
        mix = BUILT_IN_MIXES.get(profile_name or "")
        limits: dict[str, Any] = {
            "num_requests": requests,
            "duration_s": duration,
            "seed": seed,
            "rate_rps": rate,
        }
        if mix is not None:
            if write_profile is not None:
                fail(
                    f"{mix.name} has several profiles, but --write-profile writes one: leave it out"
                )
            name, rows = mix.name, generate_mix(mix, **limits)
        else:
            profile = _profile(profile_name, like)
            rows = generated(profile, **limits, closed_loop=profile.closed_loop)
            name = profile.name
        with writing(output):
            num_rows = write_trace(follow(rows, requests, "writing"), Path(output))
        if write_profile is not None:
            with writing(write_profile):
                save_profile(profile, Path(write_profile))
    click.echo(f"wrote {num_rows:,} requests like {name} to {output} (seed {seed})")


@trace.command()
@click.argument("name")
@click.option(
    "--to",
    "folder",
    type=click.Path(),
    default="traces",
    show_default=True,
    help="Folder for the files.",
)
def download(name: str, folder: str) -> None:
    """Download a public trace, or all of them, and check its sha256.

    NAME is mooncake-conversation, mooncake-toolagent, mooncake-synthetic, mooncake-arxiv,
    azure-conversation, azure-code, burstgpt or all.
    """
    from moonpool.trace.download import PUBLIC_TRACES
    from moonpool.trace.download import download as fetch

    if name != "all" and name not in PUBLIC_TRACES:
        fail(f"there is no public trace {name!r}; use {', '.join(PUBLIC_TRACES)} or all")
    words = {
        "checked": "got {}, sha256 is right",
        "not checked": "got {}, not checked: no sha256 of it is known",
        "there": "{} is already there, sha256 is right",
        "there, not checked": "{} is already there, not checked: no sha256 of it is known",
    }
    for one in PUBLIC_TRACES if name == "all" else [name]:
        public = PUBLIC_TRACES[one]
        with one_line(TraceError), progress(one, DownloadColumn()) as show:
            outcome = fetch(public, Path(folder), show)
        target = Path(folder) / public.file_name
        click.echo(f"{one}: {words[outcome].format(target)} ({public.licence})")


def _profile(name: str | None, like: str | None) -> GeneratorProfile:
    if like is not None:
        from moonpool.trace.fit import fit

        rows = open_trace(like)
        shown = follow(rows, rows.info.num_rows, "fitting")
        return fit(shown, rows.info.block_tokens, name=Path(like).stem)
    if name is None:
        return BUILT_IN["conversation"]
    if name in BUILT_IN:
        return BUILT_IN[name]
    if not Path(name).exists():
        known = ", ".join((*BUILT_IN, *BUILT_IN_MIXES))
        fail(f"there is no profile {name!r}; use {known}, or a profile's file")
    return read_profile(Path(name))


def _plain(figures: TraceFigures) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(figures, str_keys=True)
    return plain


def _print_figures(info: TraceInfo, figures: TraceFigures) -> None:
    table = Table(title=Path(info.path).name, show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    arrivals = figures.arrivals
    blocks = f"blocks of {info.block_tokens} tokens" if info.block_tokens else "no block hashes"
    table.add_row("format", f"{info.format}, {blocks}{'' if info.is_sorted else ', not sorted'}")
    left_out = [f"{info.skipped_rows:,} without prompt or answer"] if info.skipped_rows else []
    left_out += [f"{info.other_lines:,} lines that are no requests"] if info.other_lines else []
    skipped = f" ({' and '.join(left_out)} skipped)" if left_out else ""
    table.add_row("requests", f"{figures.requests:,}{skipped}")
    table.add_row("duration", f"{figures.duration_s:,.0f} s, {arrivals.rate_rps:.3g} requests/s")
    if info.ignored:
        table.add_row("not read", ", ".join(name or "(no name)" for name in info.ignored))
    if info.tick_s:
        table.add_row(
            "rounded times", f"to {info.tick_s:.3g} s; a replay spreads rows evenly over each"
        )
    spread = ", ".join(f"{value:.2f} per {w} s" for w, value in arrivals.dispersion.items())
    table.add_row("arrivals", f"gap CV {arrivals.gap_cv:.2f}; variance/mean {spread or 'unknown'}")
    table.add_row(
        "tokens/s",
        f"{arrivals.input_tokens_per_s:,.0f} in, {arrivals.output_tokens_per_s:,.0f} out",
    )
    _add_lengths(table, figures.lengths)
    if figures.blocks is not None:
        table.add_section()
        _add_blocks(table, figures.blocks)
    if figures.turns is not None:
        table.add_section()
        _add_turns(table, figures.turns)
    Console().print(table)


def _add_lengths(table: Table, lengths: Lengths) -> None:
    table.add_row("input tokens", _spread(lengths.input_tokens))
    table.add_row("output tokens", _spread(lengths.output_tokens))
    table.add_row(
        "",
        f"{lengths.prompt_per_decode_token:.1f} in per out, correlation {lengths.correlation:.2f};"
        f" {lengths.long_token_share:.1%} of input in requests above 32k",
    )


def _add_blocks(table: Table, blocks: Blocks) -> None:
    table.add_row("blocks", f"{blocks.references:,} references to {blocks.distinct:,} blocks")
    table.add_row(
        "never used again",
        f"{blocks.never_reused_share:.1%} of blocks"
        f" ({blocks.never_reused_full_share:.1%} of full ones)",
    )
    table.add_row(
        "largest hit ratio",
        f"{blocks.hit_ratio_blocks:.3f} by block, {blocks.hit_ratio_tokens:.3f} by token,"
        f" {blocks.mean_request_hit_ratio:.3f} mean of requests",
    )
    curve = ", ".join(f"{k // 1000}k {v:.3f}" for k, v in blocks.lru_hit_ratio.items())
    table.add_row("LRU hit ratio", f"{curve} (capacity in blocks)")
    hottest = ", ".join(f"{count:,}" for count in blocks.hottest_references)
    table.add_row(
        "popularity",
        f"hottest {hottest} references; {blocks.popular_blocks:,} blocks with 10 or more;"
        f" slope {blocks.popularity_slope:.2f}",
    )
    shares = ", ".join(f"{number:,}: {share:.1%}" for number, share in blocks.top_share.items())
    table.add_row("hottest's share", f"{shares} of repeated references")
    if blocks.reuse_gap_s is not None:
        table.add_row("used again after", f"{_spread(blocks.reuse_gap_s)} s")
    if blocks.chain_violations:
        table.add_row(
            "[red]broken chain[/red]",
            f"{blocks.chain_violations:,} ids follow different ids: equal ids are not equal"
            " prefixes, and hits are not to be trusted",
        )


def _add_turns(table: Table, turns: Turns) -> None:
    table.add_row("follow-ups", f"{turns.follow_ups:,} ({turns.share:.1%})")
    counts = ", ".join(f"{count:,}" for count in turns.by_index[:6])
    table.add_row("by turn", f"{counts} ... up to turn {turns.max_index}")
    if turns.gap_s is not None and turns.growth_tokens is not None:
        table.add_row("gap between turns", f"{_spread(turns.gap_s)} s")
        table.add_row("growth per turn", f"{_spread(turns.growth_tokens)} tokens")


def _spread(spread: Distribution) -> str:
    parts = (("mean", spread.mean), ("p50", spread.p50), ("p90", spread.p90), ("p99", spread.p99))
    shown = ", ".join(f"{name} {value:,.0f}" for name, value in parts)
    return f"{shown}, max {spread.max:,.0f}"
