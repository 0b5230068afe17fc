"""A real vLLM with two data-parallel ranks behind one address: they are told apart, each has its
own cache, and an adapter is loaded and unloaded while they serve. Needs MOONPOOL_VLLM_PYTHON, the
Python of a vLLM, and MOONPOOL_VLLM_MODEL, a folder that it can serve."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite.live.vllm_server import VllmServer
from moonpool_lab.demo.local_server import free_port
from moonpool_lab.replay.server import parse_metrics
from tests.differential.adapters import write_adapter
from tests.forked.commands import LocalServer
from tests.live.calls import fresh
from tests.live.waiting import wait_until

BLOCK = 32
PROMPTS = [[(number * i + 3) % 250 for i in range(200)] for number in range(3, 11, 2)]


def two_ports() -> int:
    """The first of two successive ports that were free a moment ago."""
    while True:
        port = free_port()
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


def adapter_of(model: Path, folder: Path) -> Path:
    """An adapter that changes what the model says."""
    config = json.loads((model / "config.json").read_text())
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    sizes = {"q_proj": heads * width, "v_proj": config["num_key_value_heads"] * width}
    linears = {
        f"model.layers.{layer}.self_attn.{name}": (size, hidden)
        for layer in range(config["num_hidden_layers"])
        for name, size in sizes.items()
    }
    write_adapter(folder, linears, rank=8, seed=5)
    return folder


@contextmanager
def ranked_vllm() -> Iterator[tuple[VllmServer, str]]:
    """The server, and where its ranks are listed."""
    python, model = (os.environ.get(f"MOONPOOL_VLLM_{name}") for name in ("PYTHON", "MODEL"))
    if not python or not model:
        pytest.skip("needs a vLLM: MOONPOOL_VLLM_PYTHON and MOONPOOL_VLLM_MODEL")
    events, replay = two_ports(), two_ports()
    told = {"enable_kv_cache_events": True, "publisher": "zmq"}
    told |= {"endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}
    flags = ["--enforce-eager", "--kv-events-config", json.dumps(told), "--enable-lora"]
    options = {"--block-size": BLOCK, "--max-model-len": 1024, "--max-lora-rank": 8}
    options |= {"--data-parallel-size": 2, "--api-server-count": 1, "--served-model-name": "own"}
    more = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with VllmServer(python, model, "0|1", options, flags, more) as server:
        port = server.url.rpartition(":")[2]
        yield server, f"dns://127.0.0.1:{port}?ranks=all&events={events}&replay={replay}"


def complete(url: str, **fields: Any) -> dict[str, Any]:
    body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer = fresh.post(f"{url}/v1/completions", json=body | fields, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def tokens(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def cached(answer: dict[str, Any]) -> int:
    return int((answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0)


def models(front: LocalServer) -> dict[str, str | None]:
    listed = fresh.get(f"{front.url}/v1/models").json()["data"]
    return {one["id"]: one.get("parent") for one in listed}


def hits(server: VllmServer) -> dict[str, float]:
    """Tokens that each rank has found in its cache."""
    samples = parse_metrics(fresh.get(f"{server.url}/metrics").text)
    return {
        engine: value
        for name, value in samples.items()
        for engine in ("0", "1")
        if name.startswith("vllm:prefix_cache_hits_total") and f'engine="{engine}"' in name
    }


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ranks_are_instances_and_adapters_come_and_go(tmp_path: Path) -> None:
    with ranked_vllm() as (server, source):
        words = ["--vllm-endpoints", source, "--admission", "none", "--slo-ttft", "600"]
        with LocalServer(words) as front:
            wait_until(lambda: len(front.instances()) == 2)
            measured = "measured http"
            wait_until(lambda: sum(measured in line for line in front.log_lines()) == 2)
            before = hits(server)
            first = [tokens(complete(front.url, prompt=prompt)) for prompt in PROMPTS]
            wait_until(lambda: sum(one["pool"]["cached"] for one in front.instances()) >= 24)
            again = [complete(front.url, prompt=prompt) for prompt in PROMPTS]
            assert [tokens(answer) for answer in again] == first
            assert [cached(answer) for answer in again] == [192] * len(PROMPTS)
            gained = {rank: count - before[rank] for rank, count in hits(server).items()}
            assert sum(gained.values()) == 192 * len(PROMPTS) and all(gained.values()), gained

            folder = adapter_of(Path(os.environ["MOONPOOL_VLLM_MODEL"]), tmp_path / "poet")
            asked = {"lora_name": "poet", "lora_path": str(folder)}
            told = fresh.post(f"{server.url}/v1/load_lora_adapter", json=asked, timeout=120)
            assert told.status_code == 200, told.text
            wait_until(lambda: models(front).get("poet") == "own")
            poet = {"model": "poet", "prompt": PROMPTS[0]}
            said = tokens(complete(front.url, **poet))
            assert said == tokens(complete(server.url, **poet)) != first[0]
            num_known = sum(one["pool"]["cached"] for one in front.instances())
            assert cached(complete(front.url, **poet)) == 192
            assert num_known >= 30, "the events name the blocks of the adapter"

            asked = {"lora_name": "poet"}
            told = fresh.post(f"{server.url}/v1/unload_lora_adapter", json=asked, timeout=120)
            assert told.status_code == 200, told.text
            body = {"model": "poet", "prompt": [5] * 40, "max_tokens": 4}
            refused = fresh.post(f"{front.url}/v1/completions", json=body, timeout=120)
            assert refused.status_code in (404, 503), refused.text
            wait_until(lambda: "poet" not in models(front))
            assert tokens(complete(front.url, prompt=PROMPTS[1])) == first[1]
