"""Several processes of `moonpool serve --device cuda` share one GPU, and give the answers of one
process."""

from __future__ import annotations

import random
from typing import Any

import httpx
import pytest
import torch

from moonpool_lab.demo.local_server import LocalServer
from tests.live.conftest import MODEL, SMALL

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]


WAYS = ({"temperature": 0}, {"temperature": 1.0, "top_p": 0.95, "seed": 11})


def prompts() -> list[list[int]]:
    """Returns random prompts; every second prompt begins with the prompt before it."""
    rng = random.Random(3)
    made: list[list[int]] = []
    for i in range(12):
        prefix = made[-1] if i % 2 else []
        made.append(prefix + [rng.randrange(256) for _ in range(rng.randrange(1, 400))])
    return made


def complete(client: httpx.Client, prompt: list[int], way: dict[str, Any]) -> Any:
    body = {"prompt": prompt, "logprobs": 1, "max_tokens": 24, "ignore_eos": True} | way
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]


def answers(arguments: list[str]) -> list[Any]:
    with (
        LocalServer([MODEL, *arguments, *SMALL, "--device", "cuda"]) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        asked = [(prompt, way) for prompt in prompts() for way in WAYS]
        return [complete(client, prompt, way) for prompt, way in asked * 2]


def test_disaggregated_and_cached_equals_one_instance_without_cache() -> None:
    alone = answers(["--mixed", "1", "--no-enable-prefix-caching", "--dtype", "bfloat16"])
    split = answers(["--prefill", "2", "--decode", "2"])  # uses bfloat16, the default on a GPU
    assert split == alone
    stages = ["--pipeline-parallel-size", "2", "--decode-pipeline-parallel-size", "2"]
    assert answers(["--prefill", "1", "--decode", "1", *stages]) == alone
