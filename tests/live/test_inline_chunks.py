"""A decode instance computes long prompts in chunks while the prefill pool has a queue. The answers
of the loaded cluster equal those of an idle one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.forked.commands import LocalServer
from tests.live.conftest import MODEL

pytestmark = pytest.mark.live

CHUNK_TOKENS = 64
NUM_PROMPTS = 24
FLAGS = ["--prefill", "1", "--decode", "1", "--kv-tokens", "131072", "--block-size", "16"]


def complete(client: httpx.Client, number: int, salt: str) -> dict[str, Any]:
    prompt = [1 + (7 * number + 3 * at) % 250 for at in range(900)]
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "cache_salt": salt}
    answer = client.post("/v1/completions", json=body | {"return_token_ids": True})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.long
def test_long_prompts_run_on_the_decode_instance_too() -> None:
    more = ["--max-num-batched-tokens", str(CHUNK_TOKENS), "--slo-ttft", "60", "--slo-tbt", "5"]
    with (
        LocalServer([MODEL, *FLAGS, *more]) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
        ThreadPoolExecutor(NUM_PROMPTS) as pool,
    ):
        (decode,) = [one["instance_id"] for one in server.instances() if one["role"] == "decode"]
        together = list(pool.map(lambda n: complete(client, n, "a"), range(NUM_PROMPTS)))
        where = [client.get(f"/explain/{answer['id']}").text for answer in together]
        helped = sum(f"prefill on {decode}" in text for text in where)
        assert 0 < helped < NUM_PROMPTS, where[-1]
        for number in range(NUM_PROMPTS):
            alone = complete(client, number, f"alone {number}")
            assert alone["choices"][0]["text"] == together[number]["choices"][0]["text"]
