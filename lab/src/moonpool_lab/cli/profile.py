"""`moonpool profile`: fits the cost model to this machine, and recommends chunk sizes."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from moonpool.cli.help_screen import ScreenHelp
from moonpool.cli.options import COUNT, POSITIVE, json_option
from moonpool.cli.output import check_folders, fail, need_package, one_line, write_json, writing
from moonpool.cli.server.address import SERVER_URL, Server, access_options, full_url, is_address
from moonpool.cli.server.client import ClusterClient
from moonpool.config.tables import Dtype, choices
from moonpool.plugins.engines import need_engine

if TYPE_CHECKING:
    from moonpool.cost.fitted import OffloadParts, Profile
    from moonpool_engine.engine.calibrate import StepSample
    from moonpool_engine.engine.runner import Engine

BUILTIN = "moonpool/induction"
PROFILED_TOKENS = 2560
"""Most tokens of prompt and answer of a request of a live profile."""
CALIBRATION_TOKENS = 32_768  # tokens of KVCache: room for the largest measured step
SLOS_S = (0.05, 0.1, 0.2, 0.5)
KINDS = ("prefill", "decode", "transfer")


@click.command(
    cls=ScreenHelp,
    screen=(
        "--list",
        "--clear",
        "--no-save",
        "--threads",
        "--dtype",
        "--block-size",
        "--slo-tbt",
        "--time-limit",
        "--beliefs",
        "--api-key",
        "--plot",
        "--json",
    ),
)
@click.argument("model", nargs=-1, metavar="[MODEL] [URL]")
@access_options()
@click.option(
    "--beliefs",
    "wants_beliefs",
    is_flag=True,
    help="Measure nothing, but write the server's estimates of times and their errors with"
    " --json, for `simulate --beliefs`.",
)
@click.option(
    "--no-save",
    is_flag=True,
    help="Keep no step times, so that no server of this machine starts from them.",
)
@click.option("--list", "lists", is_flag=True, help="List the step times kept on this machine.")
@click.option("--clear", "clears", is_flag=True, help="Delete the step times kept on this machine.")
@click.option(
    "--dtype",
    type=click.Choice(choices(Dtype)),
    default="auto",
    show_default=True,
    help="Number format of weights and KVCache.",
)
@click.option(
    "--threads",
    type=COUNT,
    default=1,
    show_default=True,
    help="CPU threads; use as many as the workers will.",
)
@click.option(
    "--block-size",
    type=COUNT,
    default=64,
    show_default=True,
    help="Tokens of one KVCache block.",
)
@click.option(
    "--slo-tbt",
    "slos_s",
    multiple=True,
    type=POSITIVE,
    default=SLOS_S,
    show_default=True,
    help="Recommend the chunk that keeps this time between tokens, in seconds; repeat for more.",
)
@click.option(
    "--decodes",
    type=COUNT,
    default=8,
    show_default=True,
    help="Decodes in a step besides the chunk.",
)
@click.option(
    "--context", type=COUNT, default=1024, show_default=True, help="Context tokens of each decode."
)
@click.option(
    "--time-limit",
    "--curve-time",
    "curve_s",
    type=POSITIVE,
    default=60.0,
    show_default=True,
    help="Most seconds to spend on the curve of chunk sizes.",
)
@click.option(
    "--attention",
    is_flag=True,
    help="Measure decode steps with an attention worker, too, for `simulate --attention`.",
)
@click.option("--plot", type=click.Path(dir_okay=False), help="Draw the curve to this PNG file.")
@click.option("--url", "url_flag", type=SERVER_URL, hidden=True)
@click.option("--beliefs-of", type=SERVER_URL, hidden=True)
@json_option
def profile(
    model: tuple[str, ...],
    api_key: str,
    ca_file: str,
    wants_beliefs: bool,
    no_save: bool,
    lists: bool,
    clears: bool,
    dtype: str,
    threads: int,
    block_size: int,
    slos_s: tuple[float, ...],
    decodes: int,
    context: int,
    curve_s: float,
    attention: bool,
    plot: str | None,
    url_flag: str | None,
    beliefs_of: str | None,
    json_file: str | None,
) -> None:
    """Measure prefill and decode of MODEL on this machine, or those of the cluster at URL.

    Servers predict times by step times, which they measure at a first start. This command measures
    them better, on an idle machine, keeps them for its servers, and recommends sizes of chunks.
    With a URL (or HOST:PORT) it measures an idle live cluster for its simulation; those times have
    all overheads between two steps, and are not kept.
    """
    if lists or clears:
        _show_kept(clears, json_file)
        return
    name, url = _model_and_url(model, url_flag, beliefs_of)
    if wants_beliefs or beliefs_of is not None:
        if url is None:
            raise click.UsageError("--beliefs needs the URL of a server")
        _record(Server(url, api_key, ca_file), json_file)
        return
    if url is not None:
        _profile_live(Server(url, api_key, ca_file), name if attention else None, json_file)
        return
    check_folders(plot, json_file)
    need_engine()
    if plot is not None:
        need_package("matplotlib")
    os.environ["OMP_NUM_THREADS"] = str(threads)
    from moonpool_engine.worker.profile_store import measure_profile, profile_path
    from moonpool_lab.profiling.chunk_sizes import recommend

    engine = _open(name, dtype, threads, block_size)
    click.echo(f"{'chunk':>8} {'seconds':>10} {'tokens/s':>10}")
    cost, curve = measure_profile(engine, threads, curve_s, _print_sample, keep=not no_save)
    found = recommend(cost, curve, slos_s, decodes, context)
    _print_profile(found)
    if not no_save:
        click.echo(f"kept in {profile_path(engine, threads)}")
    if attention:
        found = _with_attention(found, name, dtype)
    if plot is not None:
        from moonpool_lab.profiling.plots import plot_curve

        with writing(plot):
            plot_curve(found, f"{name}, {threads} thread(s)", Path(plot))
    write_json(json_file, msgspec.to_builtins(found, str_keys=True))


def _model_and_url(words: tuple[str, ...], *flags: str | None) -> tuple[str, str | None]:
    """Returns the model and the address of a server, in whichever order they were given. Raises
    click.UsageError if both are of one kind."""
    urls = [*filter(None, flags), *(full_url(word) for word in words if is_address(word))]
    models = [word for word in words if not is_address(word)]
    for many, kind in ((urls, "server"), (models, "model")):
        if len(many) > 1:
            raise click.UsageError(f"give one {kind}, not {' and '.join(many)}")
    return models[0] if models else BUILTIN, urls[0] if urls else None


def _show_kept(clears: bool, json_file: str | None) -> None:
    """Lists the kept step times, or deletes them."""
    from moonpool_engine.worker.profile_store import clear_profiles, kept_profiles, profiles_folder

    try:
        kept = kept_profiles()
        if clears:
            clear_profiles()
    except OSError as error:
        fail(f"{profiles_folder()} cannot be changed: {error.strerror}")
    for each in kept:
        when = datetime.fromtimestamp(each.measured_s, UTC).astimezone()
        what = each.describe() or "written by an earlier release"
        click.echo(f"{when:%Y-%m-%d %H:%M}  {what}  {each.path}")
    said = "deleted" if clears else "kept"
    profiles = "profile" if len(kept) == 1 else "profiles"
    click.echo(f"{len(kept)} {profiles} {said} in {profiles_folder()}")
    write_json(json_file, {"profiles": [msgspec.to_builtins(each) for each in kept]})


def _open(model: str, dtype: str, threads: int, block_size: int) -> Engine:
    import torch

    from moonpool_engine.engine.builtin import open_model
    from moonpool_engine.engine.device_choice import resolve_dtype
    from moonpool_engine.engine.ops import empty_cache
    from moonpool_engine.engine.runner import Engine, choose_ops, make_layout

    torch.set_num_threads(threads)
    with one_line(ValueError):
        loaded = open_model(model, resolve_dtype(dtype))
        ops = choose_ops(loaded.dtype)
        layout = make_layout(loaded, block_size, ops)
        cache = empty_cache(layout, layout.blocks_for(CALIBRATION_TOKENS))
        return Engine(loaded, ops, cache)


def _with_attention(found: Profile, model: str, dtype: str) -> Profile:
    return msgspec.structs.replace(found, offload=_attention_parts(model, dtype))


def _attention_parts(model: str, dtype: str = "auto") -> OffloadParts:
    from moonpool_engine.attention_offload.client import AttentionError
    from moonpool_lab.profiling.attention_parts import measure_parts, parts_words

    with one_line(AttentionError, ValueError):
        parts = measure_parts(model, dtype)
    click.echo(parts_words(parts))
    return parts


def _print_sample(sample: StepSample) -> None:
    rate = sample.new_tokens / sample.seconds
    click.echo(f"{sample.new_tokens:>8} {sample.seconds:>10.4f} {rate:>10.0f}")


def _print_profile(found: Profile) -> None:
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
            text += " (the smallest; the SLO is missed)"
        beside = f"and {choice.decodes} decodes of {choice.context_tokens} tokens"
        click.echo(f"{text} {beside}; a step takes {choice.step_s:.3f} s")


def _record(server: Server, json_file: str | None) -> None:
    """Prints and writes the learned cost factors of a live Conductor, with their errors."""
    from moonpool.cost.recorded import RecordError, parse_beliefs

    body = ClusterClient(server).get_bytes("/beliefs")
    try:
        record = parse_beliefs(body)
    except RecordError as error:
        fail(f"{server.url}/beliefs: {error}")
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


def _profile_live(server: Server, model: str | None, json_file: str | None) -> None:
    """Measures a live cluster, and attention workers for `model` unless it is None."""
    from moonpool_lab.cli.measurement import run_measurement
    from moonpool_lab.profiling.live_cluster import LiveWorkload, measure_live, with_parts

    check_folders(json_file)
    if model is not None:
        need_engine()
    workload = LiveWorkload(longest_tokens=PROFILED_TOKENS)

    def measure() -> dict[str, Any]:
        # first, because it takes some seconds and the cluster minutes
        parts = None if model is None else _attention_parts(model)
        profile = measure_live(server.url, workload, click.echo, server.ca_file, server.api_key)
        if parts is not None:
            profile = with_parts(profile, parts)
        found: dict[str, Any] = msgspec.to_builtins(profile.cost)
        return found

    write_json(json_file, run_measurement(measure, None))
