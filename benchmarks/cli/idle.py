"""`moonpool bench idle`."""

from __future__ import annotations

import click

from moonpool.cli.options import COUNT, json_option
from moonpool.cli.output import check_folders, fail, origin, write_json


@click.command()
@click.option(
    "--model",
    default="moonpool/induction",
    show_default=True,
    help="Model: a built-in, or a Hugging Face folder or id.",
)
@click.option(
    "--prefill", type=COUNT, default=2, show_default=True, help="Number of prefill instances."
)
@click.option(
    "--decode", type=COUNT, default=2, show_default=True, help="Number of decode instances."
)
@click.option(
    "--kv-tokens",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Tokens of KVCache per instance; 0 takes the default of `serve`.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(1.0),
    default=60.0,
    show_default=True,
    help="Seconds over which CPU time is counted.",
)
@json_option
def idle(
    model: str, prefill: int, decode: int, kv_tokens: int, seconds: float, json_file: str | None
) -> None:
    """Measure memory, CPU time and wake-ups of each process of a cluster that serves nothing."""
    from benchmarks.suite.live.idle import IdleBenchError, bench_idle
    from moonpool.demo.local_server import ServerError

    check_folders(json_file)
    flags = ["--kv-tokens", str(kv_tokens)] if kv_tokens else []
    try:
        found = bench_idle(model, prefill, decode, flags, seconds, click.echo)
    except (IdleBenchError, ServerError) as error:
        fail(str(error))
    write_json(json_file, found | {"origin": origin()})
