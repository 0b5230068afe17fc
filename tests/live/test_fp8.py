"""Real processes serve with KVCache in fp8: answers are the same on every way, with half the
bytes."""

from __future__ import annotations

import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.forked.commands import LocalServer
from tests.live.calls import fresh
from tests.live.conftest import MODEL, SMALL

PROMPTS = [random.Random(i).choices(range(256), k=n) for i, n in enumerate((5, 150, 300, 300))]
FP8 = [MODEL, *SMALL, "--kv-cache-dtype", "fp8"]
LONG = {"max_tokens": 300, "ignore_eos": True}


def ask(up: LocalServer, prompt: list[int], **more: Any) -> tuple[int, ...]:
    body = {"prompt": prompt, "max_tokens": 40, "temperature": 0.8, "seed": 3}
    body |= {"return_token_ids": True} | more
    answer = fresh.post(f"{up.url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    return tuple(answer.json()["choices"][0]["token_ids"])


@pytest.fixture(scope="module")
def alone() -> list[tuple[int, ...]]:
    with LocalServer([*FP8, "--mixed", "1", "--no-enable-prefix-caching"]) as up:
        return [ask(up, prompt, **LONG) for prompt in PROMPTS]


@pytest.mark.long
@pytest.mark.parametrize(
    "flags",
    [
        ["--prefill", "1", "--decode", "2", "--ssd-tokens", "4096"],
        pytest.param(
            ["--prefill", "1", "--decode", "2", "--pipeline-parallel-size", "2"],
            marks=pytest.mark.long,
        ),
        ["--prefill", "1", "--decode", "2", "--attention", "2"],
    ],
    ids=["ssd", "stages", "attention workers"],
)
def test_every_way_and_a_killed_instance(
    flags: list[str], alone: list[tuple[int, ...]], tmp_path: Path
) -> None:
    folder = ["--ssd-folder", str(tmp_path)] if "--ssd-tokens" in flags else []
    with LocalServer([*FP8, *flags, *folder]) as up, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda prompt: ask(up, prompt, **LONG), PROMPTS)) == alone
        running = [pool.submit(ask, up, prompt, **LONG) for prompt in PROMPTS]
        instances = fresh.get(f"{up.url}/cluster", timeout=60).json()["instances"]
        victim = next(i["pid"] for i in instances if i["role"] == "decode")
        os.kill(victim, signal.SIGKILL)
        assert [future.result() for future in running] == alone


@pytest.mark.long
def test_ranks_agree_with_themselves() -> None:
    ranks = ["--tensor-parallel-size", "2"]
    with LocalServer([*FP8, *ranks, "--prefill", "1", "--decode", "1"]) as up:
        first = [ask(up, prompt) for prompt in PROMPTS]
        assert [ask(up, prompt) for prompt in PROMPTS] == first
