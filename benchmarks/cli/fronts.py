"""`moonpool bench fronts`: vLLMs behind moonpool, behind their own router, and behind a front that
knows no cache."""

from __future__ import annotations

from typing import Annotated

import click
import msgspec

from benchmarks.cli.annotated import PeerPython, Rounds, options
from benchmarks.cli.output import measure
from moonpool.cli.options import json_option


@click.command()
@options
@json_option
def fronts(
    *,
    model: Annotated[str, "Folder of a checkpoint with tokeniser files."],
    peer_python: PeerPython,
    router_python: Annotated[str, "Python of an installation of vllm-router."] = "",
    users: Annotated[int, "Number of conversations at the same time."] = 6,
    turns: Annotated[int, "Turns of each conversation."] = 6,
    think_s: Annotated[float, "Seconds between an answer and the next turn.", "--think"] = 0.5,
    kv_tokens: Annotated[int, "Tokens of KVCache of each vLLM."] = 32_768,
    chunk_tokens: Annotated[
        int, "Most tokens of one step (the prefill chunk).", "--max-num-batched-tokens"
    ] = 512,
    rounds: Rounds = 3,
    json_file: str | None,
) -> None:
    """Compare two vLLMs behind moonpool, vllm-router and a least-loaded front."""
    from benchmarks.suite.live.fronts import FrontWorkload, bench_fronts

    talk = FrontWorkload(
        model=model,
        kv_tokens=kv_tokens,
        chunk_tokens=chunk_tokens,
        users=users,
        turns=turns,
        think_s=think_s,
    )
    measure(
        lambda: {
            "talk": msgspec.to_builtins(talk),
            **bench_fronts(peer_python, router_python, talk, rounds, click.echo),
        },
        json_file,
    )
