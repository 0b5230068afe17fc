"""`moonpool profile MODEL`: measures this machine with a model, keeps the fitted cost model, and
says which chunk sizes suit both."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from moonpool.cli.output import COUNT, fail, write_json
from moonpool.config import Dtype, choices

if TYPE_CHECKING:
    from moonpool.cost.profile import Profile
    from moonpool.engine.calibrate import Sample
    from moonpool.engine.runner import Engine

CALIBRATION_TOKENS = 32_768  # of KVCache: room for the largest step that is measured
SLOS_S = (0.05, 0.1, 0.2, 0.5)
SECONDS = click.FloatRange(min=0, min_open=True)
KINDS = ("prefill", "decode", "transfer")


@click.command()
@click.argument("model", default="moonpool/induction")
@click.option(
    "--beliefs-of",
    metavar="URL",
    help="Measure nothing: write what the server there believes and saw, with --json, for"
    " `simulate --beliefs`.",
)
@click.option("--api-key", default="", help="Of that server, if it asks for one.")
@click.option("--dtype", type=click.Choice(choices(Dtype)), default="auto", show_default=True)
@click.option(
    "--threads", type=COUNT, default=1, show_default=True, help="CPU threads, as workers will use."
)
@click.option("--block-size", type=COUNT, default=64, show_default=True)
@click.option(
    "--slo-tbt",
    "slos_s",
    multiple=True,
    type=SECONDS,
    default=SLOS_S,
    show_default=True,
    help="Recommend the chunk that keeps this time between tokens, in seconds.",
)
@click.option("--decodes", type=COUNT, default=8, show_default=True, help="Beside the chunk.")
@click.option("--context", type=COUNT, default=1024, show_default=True, help="Of each decode.")
@click.option(
    "--curve-time",
    "curve_s",
    type=SECONDS,
    default=60.0,
    show_default=True,
    help="Seconds to spend on the curve of chunk sizes at most.",
)
@click.option("--url", help="Measure the live moonpool cluster there, through its front door.")
@click.option(
    "--attention",
    is_flag=True,
    help="Also what a decode step takes with an attention worker, for `simulate --attention`.",
)
@click.option("--plot", type=click.Path(dir_okay=False), help="Draw the curve as a PNG here.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False), help="Write the profile here."
)
def profile(
    model: str,
    beliefs_of: str | None,
    api_key: str,
    dtype: str,
    threads: int,
    block_size: int,
    slos_s: tuple[float, ...],
    decodes: int,
    context: int,
    curve_s: float,
    url: str | None,
    attention: bool,
    plot: str | None,
    json_file: str | None,
) -> None:
    """Measure prefill and decode of MODEL here, fit the costs the Conductor believes in, find the
    machine's tiles and saturation, and recommend chunk sizes.

    Workers measure costs by themselves when there is no profile; run it on an idle machine for a
    better one, and for the tiles, which only this command looks for. With --url it measures an idle
    live cluster instead, for its simulation: all that happens between two steps is then in it.
    """
    if url is not None:
        from moonpool.cli.live import profile_live

        profile_live(url, model if attention else None, json_file)
        return
    if beliefs_of is not None:
        _record(beliefs_of, api_key, json_file)
        return
    os.environ["OMP_NUM_THREADS"] = str(threads)
    from moonpool.engine.chunk_sizes import recommend
    from moonpool.runtime.profile_store import measure_profile, profile_path

    engine = _open(model, dtype, threads, block_size)
    click.echo(f"{'chunk':>8} {'seconds':>10} {'tokens/s':>10}")
    cost, curve = measure_profile(engine, threads, curve_s, _say)
    found = recommend(cost, curve, slos_s, decodes, context)
    _tell(found)
    click.echo(f"kept in {profile_path(engine, threads)}")
    if attention:
        found = _with_attention(found, model, dtype)
    if plot is not None:
        from moonpool.report.chunk_curve import plot_curve

        try:
            plot_curve(found, f"{model}, {threads} thread(s)", Path(plot))
        except OSError as error:
            fail(f"cannot write {plot}: {error.strerror}")
    write_json(json_file, msgspec.to_builtins(found, str_keys=True))


def _open(model: str, dtype: str, threads: int, block_size: int) -> Engine:
    import torch

    from moonpool.engine.builtin import open_model
    from moonpool.engine.dtype import resolve_dtype
    from moonpool.engine.ops import empty_cache
    from moonpool.engine.runner import Engine, choose_ops, make_layout

    torch.set_num_threads(threads)
    try:
        loaded = open_model(model, resolve_dtype(dtype))
        ops = choose_ops(loaded.dtype)
        layout = make_layout(loaded, block_size, ops)
        cache = empty_cache(layout, layout.blocks_for(CALIBRATION_TOKENS))
        return Engine(loaded, ops, cache)
    except ValueError as error:
        fail(str(error))


def _with_attention(found: Profile, model: str, dtype: str) -> Profile:
    from moonpool.attention.client import AttentionError
    from moonpool.bench.attention_parts import measure_parts, parts_words

    try:
        parts = measure_parts(model, dtype)
    except AttentionError as error:
        fail(str(error))
    click.echo(parts_words(parts))
    return msgspec.structs.replace(found, offload=parts)


def _say(sample: Sample) -> None:
    rate = sample.new_tokens / sample.seconds
    click.echo(f"{sample.new_tokens:>8} {sample.seconds:>10.4f} {rate:>10.0f}")


def _tell(found: Profile) -> None:
    tile = f"tiles of {found.tile_tokens} tokens" if found.tile_tokens > 1 else "no tiles"
    click.echo(f"{tile}; saturated from chunks of {found.saturation_tokens} tokens on")
    click.echo(f"{'prompt':>8} {'cached':>8} {'prefill s':>10}")
    for tokens, cached in ((512, 0), (2048, 0), (2048, 1536), (8192, 0), (8192, 7680)):
        click.echo(f"{tokens:>8} {cached:>8} {found.prefill_s(tokens, cached):>10.3f}")
    click.echo(f"{'batch':>8} {'context':>8} {'step s':>10}")
    for batch, context in ((1, 512), (8, 512), (32, 512), (8, 4096)):
        click.echo(f"{batch:>8} {context:>8} {found.decode_step_s(batch, batch * context):>10.4f}")
    for choice in found.chunks:
        text = f"TBT SLO {choice.tbt_s:g} s: chunks of {choice.chunk_tokens} tokens"
        if not choice.holds:
            text += ", the least, and the SLO is missed"
        beside = f"beside {choice.decodes} decodes of {choice.context_tokens} tokens"
        click.echo(f"{text} {beside}; a step takes {choice.step_s:.3f} s")


def _record(url: str, api_key: str, json_file: str | None) -> None:
    """Prints, and writes, what a live Conductor learned of its instances."""
    import httpx

    from moonpool.cost.recorded import RecordError, parse_beliefs

    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{url.rstrip('/')}/beliefs", headers=headers, timeout=30.0)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        fail(f"no server answers at {url}: {error}")
    if answer.status_code != 200:
        fail(f"{url}/beliefs answered {answer.status_code}: is it a moonpool head, and the key?")
    try:
        record = parse_beliefs(answer.content)
    except RecordError as error:
        fail(f"{url}/beliefs: {error}")
    click.echo(f"{'instance':<16} {'prefill':>8} {'decode':>8} {'transfer':>8}  x its profile")
    for each in record.instances:
        factors = " ".join(f"{each.factors.get(kind, 1.0):>8.2f}" for kind in KINDS)
        click.echo(f"{each.instance_id:<16} {factors}")
    for name, seen in record.errors.items():
        click.echo(
            f"predicted {name}: {seen['count']:.0f} times, off by {seen['mean_absolute']:.4g} in"
            f" the mean, bias {seen['mean']:+.4g}; predicted over actual p50"
            f" {seen['ratio_p50']:.2f}, p90 {seen['ratio_p90']:.2f}"
        )
    write_json(json_file, msgspec.to_builtins(record))
