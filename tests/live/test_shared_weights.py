"""Workers of a GGUF file share the weights that the fork server has packed, and give the same
answers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from moonpool.protocol.messages import AttemptId
from moonpool.scheduler.actions import StepEntry
from moonpool.types import SamplingParams
from moonpool_engine.engine.builtin import open_model
from tests.differential.plans import Lab, make_ops
from tests.forked.commands import LocalServer
from tests.live.calls import fresh
from tests.live.conftest import SMALL
from tests.live.waiting import WAIT_S
from tests.unit.engine.gguf_files import tiny_llama

PROMPT = [(7 * i + 3) % 250 for i in range(150)]
COUNT = 12


def right_tokens(path: Path) -> list[int]:
    """Returns the tokens of one process without a cache."""
    lab = Lab(open_model(str(path), "float32"), make_ops("native"), 16, 8000)
    tokens = list(PROMPT)
    for _ in range(COUNT):
        entry = StepEntry(
            AttemptId("a"), tokens, 0, lab.take_blocks(len(tokens)), SamplingParams(temperature=0)
        )
        (token,) = lab.engine.step([entry]).tokens
        assert token is not None
        tokens.append(token.token_id)
    return tokens[len(PROMPT) :]


def ask(url: str) -> list[int]:
    body = {"prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True}
    answer = fresh.post(f"{url}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


@pytest.mark.long
def test_they_are_packed_once_and_a_restarted_worker_has_them(tmp_path: Path) -> None:
    path = tiny_llama({"": "Q8_0"}).write(tmp_path / "tiny.gguf")
    right = right_tokens(path)
    flags = [str(path), "--dtype", "float32", "--prefill", "1", "--decode", "1", *SMALL]
    with LocalServer(flags) as server:
        assert ask(server.url) == right == ask(server.url)
        loads = [line for line in server.log_lines() if " INFO loading " in line]
        assert not loads, "no worker loads for itself"
        killed = server.worker_pids()
        os.kill(killed[0], signal.SIGKILL)
        by_s = time.monotonic() + WAIT_S
        while set(server.worker_pids()) >= set(killed) or len(server.worker_pids()) < 2:
            assert time.monotonic() < by_s
            time.sleep(0.1)
        assert ask(server.url) == right
        assert not [line for line in server.log_lines() if " INFO loading " in line]
