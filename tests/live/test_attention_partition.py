"""Attention workers share long requests, or the heads of all requests. Answers are the same as
without attention workers, even from cached blocks and when workers die."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import httpx
import pytest

from tests.forked.commands import LocalServer
from tests.live.conftest import SMALL
from tests.live.test_attention import (
    SHORT,
    ask,
    ask_together,
    attention_pids,
    counters_of_soon,
    while_answering,
)

pytestmark = pytest.mark.long

MODEL = "random:hidden=128,layers=2,heads=8,kv_heads=4,inter=128,vocab=300"
LONG = {"prompt": [9, 8] * 1100, "max_tokens": 600, "temperature": 1, "seed": 5, "ignore_eos": True}
BASE = [MODEL, "--prefill", "1", "--decode", "1", *SMALL]


@pytest.fixture(scope="module")
def expected() -> list[str]:
    with LocalServer(BASE) as server:
        client = httpx.Client(base_url=server.url, timeout=60)
        return [ask(client, LONG), ask(client, SHORT)]


@pytest.mark.parametrize("partition", ["head", "tokens"])
@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.long)])
def test_answers_are_those_without(partition: str, count: int, expected: list[str]) -> None:
    arguments = ["--attention", str(count), "--attention-partition", partition]
    with LocalServer([*BASE, *arguments]) as server:
        client = httpx.Client(base_url=server.url, timeout=60)
        assert ask_together(client, [LONG, SHORT]) == expected
        assert ask(client, LONG) == expected[0]  # the second answer reads cached blocks

        def kill_one() -> None:
            os.kill(attention_pids(server)[f"attention-{count - 1}"], signal.SIGKILL)

        assert while_answering(client, LONG, kill_one, copies=1) == [expected[0]]
        assert counters_of_soon(client, "decode-0", "lost_arenas") == 1


def test_mixed_instances_have_attention_workers_too(expected: list[str]) -> None:
    arguments = ["--mixed", "2", "--attention", "2", "--attention-partition", "tokens"]
    with LocalServer([MODEL, *arguments, *SMALL]) as server:
        client = httpx.Client(base_url=server.url, timeout=60)
        assert ask_together(client, [LONG, SHORT, SHORT]) == [*expected, expected[1]]
        workers = client.get("/cluster").json()["attention"]
        assert {w["owner"] for w in workers} == {"mixed-0", "mixed-1"}


def test_too_few_heads_are_refused_in_one_line() -> None:
    arguments = ["--attention", "2", "--attention-partition", "head"]
    done = subprocess.run(
        [sys.executable, "-m", "moonpool", "serve", *arguments, "--port", "0"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "too few for 2 attention workers" in done.stderr
    assert "Traceback" not in done.stderr
