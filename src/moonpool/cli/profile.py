"""`moonpool profile MODEL`: measures this machine with a model, and keeps the fitted cost model."""

from __future__ import annotations

import os

import click
import msgspec

from moonpool.cli.output import COUNT, fail, write_json
from moonpool.config import Dtype, choices

CALIBRATION_TOKENS = 32_768  # of KVCache: room for the largest step that is measured


@click.command()
@click.argument("model", default="moonpool/induction")
@click.option("--dtype", type=click.Choice(choices(Dtype)), default="auto", show_default=True)
@click.option(
    "--threads", type=COUNT, default=1, show_default=True, help="CPU threads, as workers will use."
)
@click.option("--block-size", type=COUNT, default=64, show_default=True)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False), help="Write the profile here."
)
def profile(model: str, dtype: str, threads: int, block_size: int, json_file: str | None) -> None:
    """Measure prefill and decode of MODEL here, and fit the costs the Conductor believes in.

    Workers do this by themselves when there is no profile; run it on an idle machine for a better
    one.
    """
    os.environ["OMP_NUM_THREADS"] = str(threads)
    import torch

    from moonpool.engine.builtin import open_model
    from moonpool.engine.dtype import resolve_dtype
    from moonpool.engine.ops import empty_cache
    from moonpool.engine.runner import Engine, choose_ops, make_layout
    from moonpool.runtime.profile_store import profile_path, refine_profile

    torch.set_num_threads(threads)
    try:
        loaded = open_model(model, resolve_dtype(dtype))
        ops = choose_ops(loaded.dtype)
        layout = make_layout(loaded, block_size, ops)
        cache = empty_cache(layout, layout.blocks_for(CALIBRATION_TOKENS))
        engine = Engine(loaded, ops, cache)
    except ValueError as error:
        fail(str(error))
    cost = refine_profile(engine, threads, forget=True)
    click.echo(f"{'prompt':>8} {'cached':>8} {'prefill s':>10}")
    for tokens, cached in ((512, 0), (2048, 0), (2048, 1536), (8192, 0), (8192, 7680)):
        click.echo(f"{tokens:>8} {cached:>8} {cost.prefill_s(tokens, cached):>10.3f}")
    click.echo(f"{'batch':>8} {'context':>8} {'step s':>10}")
    for batch, context in ((1, 512), (8, 512), (32, 512), (8, 4096)):
        click.echo(f"{batch:>8} {context:>8} {cost.decode_step_s(batch, batch * context):>10.4f}")
    click.echo(f"kept in {profile_path(engine, threads)}")
    write_json(json_file, msgspec.to_builtins(cost))
