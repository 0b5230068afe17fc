"""`moonpool bench start`."""

from __future__ import annotations

import click

from moonpool.cli.options import COUNT, json_option
from moonpool.cli.output import check_folders, fail, origin, write_json


@click.command()
@click.argument("model", required=False)
@click.option("--mixed", type=click.IntRange(min=0), default=0, help="Number of mixed instances.")
@click.option(
    "--kv-tokens",
    type=COUNT,
    default=4096,
    show_default=True,
    help="Tokens of KVCache per instance.",
)
@click.option(
    "--repeats", type=COUNT, default=3, show_default=True, help="Starts after the first one."
)
@json_option
def start(
    model: str | None, mixed: int, kv_tokens: int, repeats: int, json_file: str | None
) -> None:
    """Measure the start of `serve`: seconds until ready and first token, and memory.

    MODEL is any that `serve` takes. Without one, it writes a GGUF file of 1 GB with random weights
    below the folder for temporary files (TMPDIR), and deletes it at the end.
    """
    from benchmarks.suite.live.start import StartBenchError, bench_start
    from moonpool.demo.local_server import ServerError
    from moonpool.engine.spec import ModelError

    check_folders(json_file)
    flags = ["--mixed", str(mixed)] if mixed else []
    try:
        found = bench_start(model, flags, kv_tokens, repeats, click.echo)
    except (StartBenchError, ServerError, ModelError, OSError) as error:
        fail(str(error))
    write_json(json_file, found | {"origin": origin()})
