"""`moonpool bench fronts`: vLLMs behind moonpool, and behind a front that knows no cache."""

from __future__ import annotations

import click
import msgspec

from moonpool.cli.options import COUNT
from moonpool.cli.output import run_measurement

_POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command()
@click.option("--model", required=True, help="Folder of a checkpoint with tokeniser files.")
@click.option("--peer-python", required=True, help="Python of a vLLM installation.")
@click.option(
    "--users",
    type=COUNT,
    default=6,
    show_default=True,
    help="Number of conversations at the same time.",
)
@click.option(
    "--turns", type=COUNT, default=6, show_default=True, help="Turns of each conversation."
)
@click.option(
    "--think",
    "think_s",
    type=_POSITIVE,
    default=0.5,
    show_default=True,
    help="Seconds between an answer and the next turn.",
)
@click.option(
    "--kv-tokens",
    type=COUNT,
    default=32_768,
    show_default=True,
    help="Tokens of KVCache of each vLLM.",
)
@click.option(
    "--max-num-batched-tokens",
    "chunk_tokens",
    type=COUNT,
    default=512,
    help="Most tokens of one step (the prefill chunk).",
)
@click.option(
    "--rounds",
    type=COUNT,
    default=3,
    show_default=True,
    help="Measure each case this often, in turn.",
)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False), help="Write all figures to this file."
)
def fronts(
    model: str,
    peer_python: str,
    users: int,
    turns: int,
    think_s: float,
    kv_tokens: int,
    chunk_tokens: int,
    rounds: int,
    json_file: str | None,
) -> None:
    """Compare two vLLMs behind moonpool with two behind a least-loaded front."""
    from benchmarks.suite.live.fronts import FrontWorkload, bench_fronts

    talk = FrontWorkload(
        model=model,
        kv_tokens=kv_tokens,
        chunk_tokens=chunk_tokens,
        users=users,
        turns=turns,
        think_s=think_s,
    )
    run_measurement(
        lambda: {
            "talk": msgspec.to_builtins(talk),
            **bench_fronts(peer_python, talk, rounds, click.echo),
        },
        json_file,
    )
