"""The Conductor is the request router of Ray Serve LLM, in front of real vLLM replicas.

The test needs ray and vLLM in one environment (`pip install 'ray[llm]'`, or `ray[default,serve]`,
pyarrow, fsspec and jsonref beside a vLLM for CPUs), and MOONPOOL_VLLM_MODEL, a folder that vLLM can
serve.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import httpx
import pytest

from moonpool_lab.demo.local_server import free_port
from tests.live.calls import fresh
from tests.live.ray_nodes import NODE, SETTINGS
from tests.live.waiting import WAIT_S

MODEL = os.environ.get("MOONPOOL_VLLM_MODEL", "")
pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(
        find_spec("ray") is None or find_spec("vllm") is None or not MODEL,
        reason="needs ray and vllm in one environment, and MOONPOOL_VLLM_MODEL",
    ),
]

ROUTER = {
    "request_router_class": "moonpool.ray.ConductorRouter",
    "request_router_kwargs": {"ttft_s": 20.0, "kv_tokens": 1_000_000, "max_model_tokens": 900_000},
}
LONG_S = 600.0
"""vLLM on CPUs takes minutes to start on a busy machine."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    os.environ.update({key: SETTINGS[key] for key in SETTINGS if "gcs" not in key})
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "0")
    import ray
    from ray import serve
    from ray.serve.llm import build_openai_app

    port = free_port()
    ray.init(address="local", num_cpus=16, **NODE)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    config = {
        "model_loading_config": {"model_id": "own", "model_source": MODEL},
        "accelerator_config": {"kind": "cpu"},
        "engine_kwargs": {"max_model_len": 2048, "enforce_eager": True, "max_num_seqs": 16},
        "log_engine_metrics": False,
        "deployment_config": {"num_replicas": 2, "request_router_config": ROUTER},
    }
    serve.run(build_openai_app({"llm_configs": [config]}), name="llm", route_prefix="/")
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()
    ray.shutdown()


def ask(url: str, messages: list[dict[str, str]], **more: Any) -> httpx.Response:
    body = {"model": "own", "messages": messages, "max_tokens": 8, "temperature": 0} | more
    return fresh.post(f"{url}/v1/chat/completions", json=body, timeout=LONG_S)


def described() -> dict[str, Any]:
    import ray

    actor = ray.get_actor("conductor/llm/LLMServer:own", namespace="moonpool")
    found: dict[str, Any] = ray.get(actor.describe.remote())
    return found


def test_vllm_replicas_of_serve_llm_are_chosen_by_the_conductor(url: str) -> None:
    """Whether two conversations, on a replica each, stay there, and streams and refusals reach the
    client."""
    talks = [[{"role": "user", "content": f"the rules of {name}. " * 30}] for name in "ab"]
    for turn in range(3):
        for talk in talks:
            answer = ask(url, talk)
            assert answer.status_code == 200, answer.text
            said = answer.json()["choices"][0]["message"]["content"]
            talk += [
                {"role": "assistant", "content": said},
                {"role": "user", "content": f"and in turn {turn}?"},
            ]
    blocks = described()["cached_blocks"]
    assert len(blocks) == 2 and min(blocks.values()) >= 8, "each has a conversation"
    # The prompts have the same lengths, so if one replica had computed both, the lengths would
    # differ by much.
    assert max(blocks.values()) < 2 * min(blocks.values())

    streamed = ask(url, talks[0], stream=True).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert any(event["choices"] and event["choices"][0]["delta"] for event in events)

    refused = ask(url, [{"role": "user", "content": "word " * 200_000}])
    assert refused.status_code == 429, refused.text
    assert "ttft_slo" in refused.text
    deadline = time.monotonic() + WAIT_S
    while described()["calls"]:
        assert time.monotonic() < deadline
        time.sleep(0.1)
