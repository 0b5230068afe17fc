"""Tests `/v1/embeddings` of real processes with OpenAI's client, the cache, and the rules of the
endpoint."""

from __future__ import annotations

import base64
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from tests.forked.commands import LocalServer
from tests.live.calls import fresh
from tests.live.conftest import MODEL


def ask(http: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = http.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def refused(http: httpx.Client, **body: Any) -> str:
    answer = http.post("/v1/embeddings", json=body)
    assert answer.status_code in (400, 404), answer.text
    return str(answer.json()["error"]["message"])


def test_openais_client_gets_unit_vectors_in_order(cluster: LocalServer) -> None:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    texts = [f"text number {i}" for i in range(40)]
    many = client.embeddings.create(model=MODEL, input=texts)
    assert [item.index for item in many.data] == list(range(40))
    alone = client.embeddings.create(model=MODEL, input=texts[7])
    assert alone.data[0].embedding == many.data[7].embedding != many.data[8].embedding
    assert len(alone.data[0].embedding) == 64
    assert abs(np.linalg.norm(alone.data[0].embedding) - 1) < 1e-5
    assert many.usage.prompt_tokens == many.usage.total_tokens > 40


def test_a_cached_prefix_changes_no_bit(http: httpx.Client) -> None:
    """The second prompt continues the first, over several blocks and chunks."""
    prompt = random.Random(4).choices(range(256), k=400)
    whole = ask(http, input=prompt, cache_salt="whole")
    # tries several times: on a busy machine, another instance may be faster without the prefix
    for attempt in range(8):
        salt = f"parts-{attempt}"
        first = ask(http, input=prompt[:200], cache_salt=salt)
        then = ask(http, input=prompt, cache_salt=salt)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        if then["usage"]["prompt_tokens_details"]["cached_tokens"] >= 192:
            break
    else:
        raise AssertionError("no prompt found its prefix in the cache")
    assert then["data"] == whole["data"]


def test_forms_and_dimensions(http: httpx.Client) -> None:
    plain = ask(http, input=[5, 6, 7], encoding_format="float")["data"][0]["embedding"]
    packed = ask(http, input=[[5, 6, 7]], encoding_format="base64")["data"][0]["embedding"]
    assert np.frombuffer(base64.b64decode(packed), "<f4").tolist() == pytest.approx(plain)
    short = np.array(ask(http, input=[5, 6, 7], dimensions=8)["data"][0]["embedding"])
    cut = np.array(plain[:8])
    assert np.allclose(short, cut / np.linalg.norm(cut), atol=1e-6)
    ids = {ask(http, input="a")["id"] for _ in range(2)}  # like vLLM
    assert len(ids) == 2 and all(each.startswith("embd-") for each in ids)
    assert "between 1 and 64" in refused(http, input="a", dimensions=65)
    assert "'input'" in refused(http, input="")
    assert "'input'" in refused(http)
    assert "at most 2048" in refused(http, input=["a"] * 2049)
    assert "does not exist" in refused(http, input="a", model="other")
    assert "encoding_format" in refused(http, input="a", encoding_format="int8")


@pytest.mark.long
def test_a_large_body_and_answers_beside_it(http: httpx.Client, cluster: LocalServer) -> None:
    """Another process reads bodies above 64 KiB, and chats run beside them."""
    texts = [f"{i} " + "word " * 60 for i in range(300)]

    def chat(i: int) -> str:
        body = {"prompt": f"say {i}", "max_tokens": 8, "temperature": 0}
        answer = fresh.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
        return str(answer.json()["choices"][0]["text"])

    before = chat(1)
    with ThreadPoolExecutor() as pool:
        chats = pool.map(chat, [1] * 4)
        many = ask(http, input=texts)
    assert len(many["data"]) == 300 and set(chats) == {before}
    assert many["data"][9]["embedding"] == ask(http, input=texts[9])["data"][0]["embedding"]
