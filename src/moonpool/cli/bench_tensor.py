"""`moonpool bench tensor`: an instance of several ranks beside one process."""

from __future__ import annotations

import click

from moonpool.cli.origin import origin
from moonpool.cli.output import COUNT, fail, write_json


@click.command()
@click.option("--model", default="random:m150", show_default=True)
@click.option("--ranks", type=click.Choice(["2", "4", "8"]), default="2", show_default=True)
@click.option("--repeats", type=COUNT, default=3, show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help="Write the figures.")
def tensor(model: str, ranks: str, repeats: int, json_file: str | None) -> None:
    """An instance of several ranks beside one process: prompts, decodes, and what sums take of
    them. One thread a rank, about two minutes."""
    from moonpool.bench.tensor import bench_tensor
    from moonpool.engine.stages.fellows import StageLostError
    from moonpool.messenger.arena import ArenaError

    try:
        found = bench_tensor(model, int(ranks), repeats, click.echo)
    except (ArenaError, StageLostError, ValueError) as error:
        fail(str(error))
    write_json(json_file, found | {"origin": origin()})
