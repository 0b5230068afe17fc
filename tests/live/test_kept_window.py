"""Real processes serve a model whose layers all have a window: they hold few blocks, and answers
are the same on every way."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.forked.commands import LocalServer
from tests.live.calls import fresh
from tests.live.conftest import SMALL
from tests.live.test_fp8 import LONG, PROMPTS, ask

MODEL = "random:hidden=64,layers=3,heads=4,kv_heads=2,inter=128,vocab=300"
WINDOW = [f"{MODEL},window=40", *SMALL]


def held_blocks(up: LocalServer) -> int:
    """Returns the blocks that the decode instances have reported as held."""
    instances = fresh.get(f"{up.url}/cluster", timeout=60).json()["instances"]
    return sum(i["pool"].get("held", 0) for i in instances if i["role"] == "decode")


@pytest.fixture(scope="module")
def alone() -> list[tuple[int, ...]]:
    with LocalServer([*WINDOW, "--mixed", "1", "--no-enable-prefix-caching"]) as up:
        return [ask(up, prompt, **LONG) for prompt in PROMPTS]


@pytest.mark.long
@pytest.mark.parametrize("more", [[], ["--pipeline-parallel-size", "2"]], ids=["plain", "stages"])
def test_every_way_and_a_killed_instance(more: list[str], alone: list[tuple[int, ...]]) -> None:
    flags = ["--prefill", "1", "--decode", "2", "--ssd-tokens", "4096", *more]
    with LocalServer([*WINDOW, *flags]) as up, ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda prompt: ask(up, prompt, **LONG), PROMPTS)) == alone
        running = [pool.submit(ask, up, prompt, **LONG) for prompt in PROMPTS]
        instances = fresh.get(f"{up.url}/cluster", timeout=60).json()["instances"]
        victim = next(i["pid"] for i in instances if i["role"] == "decode")
        os.kill(victim, signal.SIGKILL)
        assert [future.result() for future in running] == alone


@pytest.mark.parametrize("window", [40, pytest.param(0, marks=pytest.mark.long)])
def test_a_long_answer_holds_few_blocks(window: int) -> None:
    model = f"{MODEL},window={window}" if window else MODEL
    prompt = PROMPTS[1]
    with (
        LocalServer([model, *SMALL, "--prefill", "1", "--decode", "1"]) as up,
        ThreadPoolExecutor(1) as pool,
    ):
        asked = pool.submit(ask, up, prompt, max_tokens=2500, ignore_eos=True)
        seen = []
        while not asked.done():
            seen.append(held_blocks(up))
        assert len(asked.result()) == 2500
    most_blocks = -(-(len(prompt) + 2500) // 16)
    if window:
        assert max(seen) <= len(prompt) // 16 + 1
        assert sorted(seen)[len(seen) // 2] <= 5, seen
    else:
        assert max(seen) > most_blocks // 2, "the gauge shows an answer that holds all"
