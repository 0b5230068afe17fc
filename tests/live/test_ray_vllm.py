"""Ray starts a real vLLM with moonpool's connector, and a pool on its node. A vLLM that was killed
comes back and finds its blocks in the pool.

The test needs ray, vLLM and moonpool's three packages in one environment, and MOONPOOL_VLLM_MODEL,
a folder that vLLM can serve.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite.live.vllm_server import vllm_command
from tests.live.calls import fresh
from tests.live.ray_nodes import OnRay, RayNodes, descendants_of, parent_of
from tests.live.test_faults import command_of, wait_until_gone
from tests.live.vllm_pool.run import CONNECTOR
from tests.live.waiting import wait_until

MODEL = os.environ.get("MOONPOOL_VLLM_MODEL", "")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        find_spec("ray") is None or find_spec("vllm") is None or not MODEL,
        reason="needs ray and vllm in one environment, and MOONPOOL_VLLM_MODEL",
    ),
]

START_S = 900.0
"""vLLM on CPUs takes minutes to start on a busy machine."""
JOIN_S = 3.0
"""vLLM may answer before its processes have joined the pool."""
VARIABLES = {
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
CONFIG = """
[cluster]
launcher = "ray"
mixed = 1
prefill = 0
decode = 0

[engine]
kind = "vllm"

[ray]
name = "pooled"
pool_bytes = 268435456
vllm_command = '''
{program} serve {model} --enforce-eager --block-size 32 --max-model-len 1024 --port {{port}}
--kv-transfer-config '{connector}'
'''
"""
PROMPT = [(7 * i) % 250 + 3 for i in range(200)]
FULL_TOKENS = 192
"""Tokens in the full blocks of 32 of the prompt."""


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayNodes]:
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    made = RayNodes(num_nodes=1)
    yield made
    made.shutdown()


def ask(url: str, prompt: list[int]) -> list[int]:
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    answer = fresh.post(f"{url}/v1/completions", json=body, timeout=START_S)
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


class Instance:
    """The only instance, as it is now: its actor, and the vLLM that the actor keeps."""

    def __init__(self, served: OnRay, url: str) -> None:
        found = served.instances(url)["mixed-0"]
        self.incarnation = found["incarnation"]
        self.actor = parent_of(found["pid"])
        below = [pid for pid in descendants_of(self.actor) if parent_of(pid) == self.actor]
        (self.vllm,) = (pid for pid in below if "--kv-transfer-config" in command_of(pid))

    def loaded_tokens(self) -> float:
        """Returns how many tokens of prompts this vLLM has taken from the pool."""
        found = re.search(r"--port (\d+)", command_of(self.vllm))
        assert found
        told = fresh.get(f"http://127.0.0.1:{found[1]}/metrics", timeout=60).text
        hits = re.findall(r"external_prefix_cache_hits_total\{.*\} (\S+)", told)
        return sum(map(float, hits))


def next_instance(served: OnRay, url: str, before: Instance) -> Instance:
    def is_new() -> bool:
        found = served.instances(url).get("mixed-0", {}).get("incarnation")
        return found is not None and found != before.incarnation

    wait_until(is_new, "no vLLM has taken its place", START_S)
    time.sleep(JOIN_S)
    return Instance(served, url)


def test_a_killed_vllm_comes_back_and_finds_its_blocks(nodes: RayNodes, tmp_path: Path) -> None:
    config = tmp_path / "moonpool.toml"
    program, connector = vllm_command(sys.executable), json.dumps(CONNECTOR)
    config.write_text(CONFIG.format(program=program, model=MODEL, connector=connector))
    served = OnRay(nodes, "--config", str(config), "--port", "0")
    try:
        wait_until(lambda: "serving at" in served.log, "no vLLM has joined", START_S)
        url = served.wait_until_up(1)[0]
        time.sleep(JOIN_S)
        first = Instance(served, url)
        answer = ask(url, PROMPT)
        ask(url, PROMPT[:40][::-1])  # the blocks are stored in the steps after their own
        assert first.loaded_tokens() == 0
        # Its engine is a process of its own, which must not outlive it.
        below = descendants_of(first.vllm)
        assert below
        os.kill(first.vllm, signal.SIGKILL)
        second = next_instance(served, url, first)
        assert wait_until_gone(below) == []
        assert second.actor == first.actor and ask(url, PROMPT) == answer
        assert second.loaded_tokens() == FULL_TOKENS

        below = descendants_of(second.actor)
        os.kill(second.actor, signal.SIGKILL)
        third = next_instance(served, url, second)
        assert wait_until_gone(below) == []
        assert ask(url, PROMPT) == answer
        assert third.loaded_tokens() == FULL_TOKENS
        below = descendants_of(third.actor)
    finally:
        assert served.stop() == 0, served.log[-3000:]
    assert wait_until_gone(below) == []
    assert not list(Path(f"/dev/shm/moonpool-{os.getuid()}").glob("ray-pooled-*"))
