"""`moonpool bench fronts`: vLLMs behind moonpool, and behind a front that knows no cache."""

from __future__ import annotations

import click
import msgspec

from moonpool.cli.live import run_bench
from moonpool.cli.output import COUNT

_POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command()
@click.option("--model", required=True, help="A checkpoint's folder with tokeniser files.")
@click.option("--peer-python", required=True, help="Python of a vLLM installation.")
@click.option("--users", type=COUNT, default=6, show_default=True, help="Conversations at once.")
@click.option("--turns", type=COUNT, default=6, show_default=True, help="Of each conversation.")
@click.option("--think", "think_s", type=_POSITIVE, default=0.5, show_default=True, help="Seconds.")
@click.option("--kv-tokens", type=COUNT, default=32_768, show_default=True, help="Of each vLLM.")
@click.option("--max-num-batched-tokens", "chunk_tokens", type=COUNT, default=512)
@click.option("--rounds", type=COUNT, default=3, show_default=True, help="Of each, taking turns.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False))
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
    """Two vLLMs behind moonpool, and behind a front that sends to whichever has less to do."""
    from moonpool.bench.fronts import Talk, bench_fronts

    talk = Talk(
        model=model,
        kv_tokens=kv_tokens,
        chunk_tokens=chunk_tokens,
        users=users,
        turns=turns,
        think_s=think_s,
    )
    run_bench(
        lambda: {
            "talk": msgspec.to_builtins(talk),
            **bench_fronts(peer_python, talk, rounds, click.echo),
        },
        json_file,
    )
