"""Serves GGUF files of a dense model, a mixture and latents in every way: the tokens equal those of
one process, with structured answers, speculation, and a decode instance that is killed during an
answer."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from tests.differential.checkpoints import Case, save
from tests.differential.gguf_conversion import convert
from tests.differential.test_gguf_families import FILES as CONVERTED
from tests.forked.commands import LocalServer
from tests.live.calls import fresh
from tests.live.conftest import SMALL
from tests.live.family_checkpoints import POSITIONS, WAYS
from tests.live.test_families import LONG, Tokens, answers, check, shards_of

FILES = {
    "qwen3": ("qwen3", Case("Qwen3", {"head_dim": 32})),
    **{name: CONVERTED[name] for name in ("qwen3moe", "gpt-oss", "deepseek-v3")},
}
SPECULATION = ["--speculative-config", '{"method": "ngram", "prompt_lookup_min": 1}']
MORE_WAYS = WAYS | {
    "P/D with drafts": ["--prefill", "1", "--decode", "1", *SPECULATION],
    "attention workers with drafts": [*WAYS["attention workers"], *SPECULATION],
}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def made(name: str) -> Path:
        architecture, case = FILES[name]
        own = {"max_position_embeddings": POSITIONS}
        if name == "deepseek-v3":
            own["moe_intermediate_size"] = 64
        folder = tmp_path_factory.mktemp(name)
        save(replace(case, changes={**case.changes, **own}), folder)
        return convert(folder, architecture, "Q8_0").write(folder / "model.gguf")

    return made


@pytest.fixture(scope="module")
def alone(file: Callable[[str], Path]) -> Callable[..., tuple[Tokens, Tokens, object]]:
    """Returns the answers of one instance without cache, and a long answer."""

    @cache
    def found(name: str, *more: str) -> tuple[Tokens, Tokens, object]:
        with LocalServer(
            [*serving(file(name)), "--mixed", "1", "--no-enable-prefix-caching", *more]
        ) as up:
            long = fresh.post(f"{up.url}/v1/completions", json=LONG, timeout=120).json()
            return *answers(up), long["choices"][0]["token_ids"]

    return found


def serving(path: Path) -> list[str]:
    return [str(path), "--dtype", "float32", *SMALL]


def pairs() -> list[object]:
    """Returns each file with another way, or with all ways if MOONPOOL_ALL_WAYS=1 is set."""
    every = [(name, way) for name in FILES for way in MORE_WAYS]
    if os.environ.get("MOONPOOL_ALL_WAYS") == "1":
        return every
    return [pair for number, pair in enumerate(every) if number % 6 == 0]


@pytest.mark.long
@pytest.mark.parametrize(("name", "way"), pairs())
def test_the_tokens_are_those_of_one_process(
    name: str,
    way: str,
    file: Callable[[str], Path],
    alone: Callable[..., tuple[Tokens, Tokens, object]],
    tmp_path: Path,
) -> None:
    """Whether the tokens are equal from the cache, with a grammar, and through the death of the
    decode instance."""
    flags = [*serving(file(name)), *MORE_WAYS[way]]
    if "--ssd-tokens" in flags:
        flags += ["--ssd-folder", str(tmp_path)]
    check(flags, alone(name, *shards_of(way)))
