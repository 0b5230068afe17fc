"""A real vLLM with two data-parallel ranks behind one address: they are told apart, each has its
own cache, and an adapter is loaded and unloaded while they serve. Needs MOONPOOL_VLLM_PYTHON, the
Python of a vLLM, and MOONPOOL_VLLM_MODEL, a folder that it can serve."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from benchmarks.suite.live.vllm_server import VllmServer
from moonpool_lab.demo.local_server import free_port
from tests.differential.adapters import write_adapter
from tests.forked.commands import LocalServer
from tests.live.calls import fresh
from tests.live.waiting import wait_until

BLOCK = 32
CACHED = 192
"""Tokens of a prompt in whole blocks."""
ASKED = {"max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
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
    answer = fresh.post(f"{url}/v1/completions", json=ASKED | fields, timeout=120)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def tokens(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def models(front: LocalServer) -> dict[str, str | None]:
    listed = fresh.get(f"{front.url}/v1/models").json()["data"]
    return {one["id"]: one.get("parent") for one in listed}


class Ranks:
    """Asks the front, and knows which rank has computed which prompt."""

    def __init__(self, front: LocalServer) -> None:
        self._front = front
        self._names = (f"call-{number}" for number in count())
        self.seen: dict[str, set[tuple[str, int]]] = {}  # by instance: models and prompts

    def ask(self, model: str, number: int) -> list[int]:
        """A prompt is cached where it has been computed before, and nowhere else."""
        name = next(self._names)
        fields = ASKED | {"model": model, "prompt": PROMPTS[number]}
        head = {"x-request-id": name}
        url = f"{self._front.url}/v1/completions"
        answer = fresh.post(url, json=fields, headers=head, timeout=120)
        assert answer.status_code == 200, answer.text
        place = fresh.get(f"{self._front.url}/explain/{name}").json()["decode_instance"]
        known = self.seen.setdefault(place, set())
        details = answer.json()["usage"]["prompt_tokens_details"] or {}
        found = details.get("cached_tokens") or 0
        assert found == (CACHED if (model, number) in known else 0), (place, self.seen)
        known.add((model, number))
        return tokens(answer.json())

    def ask_all(self) -> list[list[int]]:
        """All prompts at a time, so that no rank is idle."""
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            return list(pool.map(lambda number: self.ask("own", number), range(len(PROMPTS))))

    def are_told(self) -> bool:
        """Whether the events have named what each rank has computed."""
        told = {one["instance_id"]: one["pool"]["cached"] for one in self._front.instances()}
        return all(told[at] >= len(known) * CACHED // BLOCK for at, known in self.seen.items())


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_ranks_are_instances_and_adapters_come_and_go(tmp_path: Path) -> None:
    with ranked_vllm() as (server, source):
        words = ["--vllm-endpoints", source, "--admission", "none", "--slo-ttft", "600"]
        with LocalServer(words) as front:
            wait_until(lambda: len(front.instances()) == 2)
            measured = "measured http"
            wait_until(lambda: sum(measured in line for line in front.log_lines()) == 2)
            ranks = Ranks(front)
            first = ranks.ask_all()
            wait_until(ranks.are_told)
            wait_until(lambda: bool(ranks.ask_all()) and len(ranks.seen) == 2)

            folder = adapter_of(Path(os.environ["MOONPOOL_VLLM_MODEL"]), tmp_path / "poet")
            asked = {"lora_name": "poet", "lora_path": str(folder)}
            told = fresh.post(f"{server.url}/v1/load_lora_adapter", json=asked, timeout=120)
            assert told.status_code == 200, told.text
            wait_until(lambda: models(front).get("poet") == "own")
            said = ranks.ask("poet", 0)
            own = complete(server.url, model="poet", prompt=PROMPTS[0])
            assert said == tokens(own) != first[0]
            wait_until(ranks.are_told, "the events name the blocks of the adapter")

            asked = {"lora_name": "poet"}
            told = fresh.post(f"{server.url}/v1/unload_lora_adapter", json=asked, timeout=120)
            assert told.status_code == 200, told.text
            body = {"model": "poet", "prompt": [5] * 40, "max_tokens": 4}
            refused = fresh.post(f"{front.url}/v1/completions", json=body, timeout=120)
            assert refused.status_code in (404, 503), refused.text
            wait_until(lambda: "poet" not in models(front))
            assert ranks.ask("own", 1)
