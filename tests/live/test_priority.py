"""Tests `priority` at a live server: an urgent request overtakes prompts that wait at the
instance."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.forked.commands import LocalServer
from tests.live.calls import fresh
from tests.live.conftest import MODEL

NUM_LONG = 40
LINE = [MODEL, "--mixed", "1", "--prefill", "0", "--decode", "0", "--admission", "none"]
LINE += ["--kv-tokens", "131072", "--block-size", "16", "--max-num-batched-tokens", "128"]


class Flood(threading.Thread):
    """Sends one streamed call with many long prompts, each of which draws one token."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self._url = url
        self.began = threading.Event()
        self.num_done = 0

    def run(self) -> None:
        prompts = [[number + 4] * 1500 for number in range(NUM_LONG)]
        body = {"prompt": prompts, "max_tokens": 1, "ignore_eos": True, "temperature": 0}
        body |= {"stream": True, "priority": 10}
        with fresh.stream("POST", f"{self._url}/v1/completions", json=body, timeout=300) as answer:
            assert answer.status_code == 200
            for line in answer.iter_lines():
                if '"finish_reason":"length"' in line.replace(" ", ""):
                    self.num_done += 1
                    self.began.set()


@pytest.mark.long
def test_an_urgent_request_overtakes_a_flood_of_long_prompts() -> None:
    with LocalServer(LINE) as server:
        urgent: dict[str, Any] = {"prompt": [3] * 20, "max_tokens": 1, "ignore_eos": True}
        flood = Flood(server.url)
        flood.start()
        assert flood.began.wait(120)
        url = f"{server.url}/v1/completions"
        answer = fresh.post(url, json={**urgent, "priority": -1}, timeout=120)
        num_before = flood.num_done
        assert answer.status_code == 200
        refused = fresh.post(url, json={**urgent, "priority": 2**31}, timeout=120)
        flood.join(300)
    assert num_before < NUM_LONG // 2, "it waited for the flood"
    assert flood.num_done == NUM_LONG, "the flood ends, too"
    assert refused.status_code == 400
    assert "'priority'" in refused.json()["error"]["message"]
