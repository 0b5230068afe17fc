"""Serves every family in every way: the tokens equal those of one process without cache.

Each cluster gets its calls twice, so that the second answers begin in the cache. It also gives
answers with a grammar, and its decode instance is killed during an answer.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from moonpool_engine.engine.builtin import open_model
from moonpool_engine.engine.families.registry import FAMILIES
from tests.forked.commands import LocalServer
from tests.live.calls import fresh
from tests.live.conftest import SMALL
from tests.live.family_checkpoints import WAYS, flags_of, refusal, write
from tests.live.test_faults import answer_while_killing, run_command

PROMPTS = [random.Random(i).choices(range(3, 290), k=n) for i, n in enumerate((5, 90, 200, 200))]
SAMPLED: dict[str, Any] = {"temperature": 0.8, "seed": 3, "ignore_eos": True, "max_tokens": 60}
GRAMMAR = {"structured_outputs": {"regex": "(wave|sand){4,9}!"}, "ignore_eos": False}
LONG = SAMPLED | {"prompt": PROMPTS[1], "max_tokens": 700, "return_token_ids": True}
FP8_FAMILIES = ("llama", "gemma3_text", "deepseek_v2", "gpt_oss")
"""Lists one family of each kind of attention."""

Tokens = list[tuple[int, ...]]


def tokens_of(up: LocalServer, prompt: list[int], **more: Any) -> tuple[int, ...]:
    body = SAMPLED | {"prompt": prompt, "return_token_ids": True} | more
    answer = fresh.post(f"{up.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return tuple(answer.json()["choices"][0]["token_ids"])


def answers(up: LocalServer) -> tuple[Tokens, Tokens]:
    """Holds plain answers and answers with a grammar."""
    with ThreadPoolExecutor(4) as pool:
        plain = list(pool.map(lambda prompt: tokens_of(up, prompt), PROMPTS))
        bound = list(pool.map(lambda prompt: tokens_of(up, prompt, **GRAMMAR), PROMPTS))
    return plain, bound


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def made(family: str) -> Path:
        folder = tmp_path_factory.mktemp(family)
        write(family, folder)
        return folder

    return made


def serving(folder: Path, *more: str) -> list[str]:
    return [str(folder), "--dtype", "float32", *SMALL, *more]


@pytest.fixture(scope="module")
def alone(checkpoint: Callable[[str], Path]) -> Callable[..., tuple[Tokens, Tokens, Any]]:
    """Returns the answers of one process without cache, and a long answer."""

    @cache
    def found(family: str, *more: str) -> tuple[Tokens, Tokens, Any]:
        flags = serving(checkpoint(family), "--mixed", "1", "--no-enable-prefix-caching", *more)
        with LocalServer(flags) as up:
            long = fresh.post(f"{up.url}/v1/completions", json=LONG, timeout=120).json()
            return *answers(up), long["choices"][0]["token_ids"]

    return found


def shards_of(way: str) -> tuple[str, ...]:
    """Returns the flags with which one instance sums like `way`. Sums over shards are rounded
    otherwise, so a token may differ at a tie."""
    return ("--tensor-parallel-size", "2") if way == "ranks" else ()


def check(flags: list[str], expected: tuple[Tokens, Tokens, Any]) -> None:
    plain, bound, long = expected
    with LocalServer(flags) as up, httpx.Client(base_url=up.url, timeout=120) as client:
        for _ in range(2):
            assert answers(up) == (plain, bound)
        killed = answer_while_killing(client, "decode", body=LONG)
        assert killed["choices"][0]["token_ids"] == long
        assert answers(up) == (plain, bound)


def some_ways() -> list[Any]:
    """Returns every seventh pair of family and way, so that each way, latents and linear attention
    have several pairs. With MOONPOOL_ALL_WAYS=1, which takes ten minutes more, returns all pairs.
    """
    pairs = [
        (family, way)
        for family in FAMILIES
        for way in WAYS
        if way == "stages and SSD" or not FAMILIES[family].delta
    ]
    if os.environ.get("MOONPOOL_ALL_WAYS") == "1":
        return pairs
    return [pair for number, pair in enumerate(pairs) if number % 7 == 5]


@pytest.mark.long
@pytest.mark.parametrize(("family", "way"), some_ways())
def test_the_tokens_are_those_of_one_process(
    family: str,
    way: str,
    checkpoint: Callable[[str], Path],
    alone: Callable[..., tuple[Tokens, Tokens, Any]],
    tmp_path: Path,
) -> None:
    assert not refusal(open_model(str(checkpoint(family)), "float32"), way)
    flags = serving(checkpoint(family), *flags_of(family, way))
    if "--ssd-tokens" in flags:
        flags += ["--ssd-folder", str(tmp_path)]
    check(flags, alone(family, *shards_of(way)))


@pytest.mark.long
@pytest.mark.parametrize("family", FP8_FAMILIES)
def test_the_tokens_of_kvcache_in_fp8(
    family: str,
    checkpoint: Callable[[str], Path],
    alone: Callable[..., tuple[Tokens, Tokens, Any]],
) -> None:
    fp8 = ("--kv-cache-dtype", "fp8")
    flags = serving(checkpoint(family), "--prefill", "1", "--decode", "1", *fp8)
    expected = alone(family, *fp8)
    assert expected[0] != alone(family)[0]
    check(flags, expected)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "partition"),
    [("gpt_oss", "head"), ("gemma3_text", "tokens"), ("deepseek_v3", "tokens")],
)
def test_attention_workers_with_fp8_and_other_partitions(
    family: str,
    partition: str,
    checkpoint: Callable[[str], Path],
    alone: Callable[..., tuple[Tokens, Tokens, Any]],
) -> None:
    fp8 = ("--kv-cache-dtype", "fp8")
    more = ("--attention-partition", partition, *fp8)
    check(serving(checkpoint(family), *WAYS["attention workers"], *more), alone(family, *fp8))


@pytest.mark.long
def test_too_many_workers_by_head_are_one_line(checkpoint: Callable[[str], Path]) -> None:
    by_head = ("--attention-partition", "head")
    flags = serving(checkpoint("deepseek_v2"), *WAYS["attention workers"], *by_head)
    done = run_command("serve", *flags)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    assert "1 kv heads, too few for 2 attention workers" in done.stderr.strip().splitlines()[-1]
