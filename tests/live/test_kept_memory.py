"""The cache is still warm after a kill of a worker, and with --keep-memory after a kill of the
server."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.forked.commands import LocalServer
from tests.live.conftest import MODEL
from tests.live.test_faults import wait_until_gone
from tests.live.waiting import WAIT_S

NUM_PROMPTS = 12
PROMPT_TOKENS = 200
BLOCK_TOKENS = 16
MOST = NUM_PROMPTS * (PROMPT_TOKENS // BLOCK_TOKENS) * BLOCK_TOKENS
FLAGS = ["--kv-tokens", "16384", "--block-size", str(BLOCK_TOKENS), "--threads", "1"]


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as path:
        yield Path(path) / "kept"


def serve(*flags: str, model: str = MODEL) -> LocalServer:
    return LocalServer([model, "--mixed", "1", *FLAGS, *flags])


class Asker:
    def __init__(self, url: str) -> None:
        self.http = httpx.Client(base_url=url, timeout=120)

    def ask(self, prompt: list[int], max_tokens: int = 6) -> tuple[str, int]:
        """Returns the answer, and how many of the prompt's tokens were cached."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        answer: dict[str, Any] = self.http.post("/v1/completions", json=body).json()
        usage = answer["usage"]["prompt_tokens_details"]
        return answer["choices"][0]["text"], usage["cached_tokens"]

    def ask_all(self) -> tuple[list[str], int]:
        answers = [self.ask(prompt) for prompt in prompts()]
        return [text for text, _ in answers], sum(cached for _, cached in answers)

    def wait_for_blocks(self, but_not: int = 0) -> int:
        """Waits for an instance with a process other than `but_not` that has announced blocks."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            for instance in self.http.get("/cluster").json()["instances"]:
                if instance["pid"] != but_not and instance["indexed_blocks"]:
                    return int(instance["pid"])
            time.sleep(0.1)
        raise AssertionError("no instance announced blocks")


def prompts() -> list[list[int]]:
    rng = random.Random(7)
    return [[rng.randrange(300) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Returns the answers without a cache."""
    with serve("--no-enable-prefix-caching") as server:
        texts, cached = Asker(server.url).ask_all()
        assert not cached
        return texts


@pytest.mark.long
@pytest.mark.parametrize(
    "parts", ["one process", pytest.param("two stages", marks=pytest.mark.long)]
)
def test_the_successor_of_a_killed_worker_is_warm(expected: list[str], parts: str) -> None:
    flags = ["--pipeline-parallel-size", "2"] if parts == "two stages" else []
    with serve(*flags) as server:
        asker = Asker(server.url)
        assert asker.ask_all() == (expected, 0)
        old = asker.wait_for_blocks()
        for _ in range(2):  # kills the successor of the killed worker, too
            os.kill(old, signal.SIGKILL)
            old = asker.wait_for_blocks(but_not=old)
            assert asker.ask_all() == (expected, MOST)


@pytest.mark.long
def test_a_worker_killed_while_it_computes_leaves_no_wrong_block(expected: list[str]) -> None:
    """The pool is too small for all prompts, so blocks are overwritten."""
    rng = random.Random(1)
    with serve("--kv-tokens", "2048") as server, ThreadPoolExecutor(4) as threads:
        asker = Asker(server.url)
        pid = asker.ask_all() and asker.wait_for_blocks()
        cached = 0
        for _ in range(3):
            answers = [threads.submit(asker.ask, prompt) for prompt in prompts()]
            time.sleep(0.5 * rng.random())
            os.kill(pid, signal.SIGKILL)
            assert [answer.result()[0] for answer in answers] == expected
            cached += sum(answer.result()[1] for answer in answers)
            pid = asker.wait_for_blocks(but_not=pid)
        assert cached


@pytest.mark.parametrize("how", [pytest.param("stopped", marks=pytest.mark.long), "killed"])
def test_memory_survives_a_restart_of_the_server(
    expected: list[str], folder: Path, how: str
) -> None:
    with serve("--keep-memory", str(folder)) as server:
        assert Asker(server.url).ask_all() == (expected, 0)
        if how == "killed":
            pids = server.worker_pids()
            server.kill()
            assert wait_until_gone(pids) == []
    with serve("--keep-memory", str(folder)) as server:
        asker = Asker(server.url)
        asker.wait_for_blocks()
        assert asker.ask_all() == (expected, MOST)


@pytest.mark.long
def test_another_model_or_server_starts_cold(expected: list[str], folder: Path) -> None:
    with serve("--keep-memory", str(folder)) as server:
        assert Asker(server.url).ask_all() == (expected, 0)
        with serve("--keep-memory", str(folder)) as second:
            assert Asker(second.url).ask_all() == (expected, 0)
            assert "in use by another process" in second.last_words(200)
    other = "random:hidden=64,layers=3,heads=4,kv_heads=2,inter=96,vocab=300"
    with serve("--keep-memory", str(folder), model=other) as server:
        assert Asker(server.url).ask_all()[1] == 0
        assert server.last_words(200).count("starting cold") == 1


@pytest.mark.long
def test_nothing_is_kept_where_that_is_asked_for(expected: list[str]) -> None:
    with serve("--keep-memory", "off") as server:
        asker = Asker(server.url)
        assert asker.ask_all() == (expected, 0)
        old = asker.wait_for_blocks()
        os.kill(old, signal.SIGKILL)
        assert asker.ask(prompts()[0]) == (expected[0], 0)
