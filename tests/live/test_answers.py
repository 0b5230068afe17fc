"""A response of status 200 is right: its tokens are the same on each way of a request through a
cluster of real processes."""

from __future__ import annotations

import random
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from moonpool.cost.recorded import parse_beliefs
from tests.forked.commands import LocalServer, run_command
from tests.live.conftest import MODEL, SMALL
from tests.live.waiting import wait_until, wait_until_idle

GREEDY = {"temperature": 0, "max_tokens": 24, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "top_p": 0.95, "seed": 11, "max_tokens": 24, "ignore_eos": True}
PENALISED = SAMPLED | {"presence_penalty": 0.7, "frequency_penalty": 0.3, "min_p": 0.001}
PENALISED |= {"repetition_penalty": 1.3}


def prompts(count: int, seed: int) -> list[list[int]]:
    """Returns random prompts; every second prompt begins with the prompt before it."""
    rng = random.Random(seed)
    made: list[list[int]] = []
    for i in range(count):
        prefix = made[-1] if i % 2 else []
        made.append(prefix + [rng.randrange(256) for _ in range(rng.randrange(1, 400))])
    return made


def complete(client: httpx.Client, prompt: list[int], parameters: dict[str, Any]) -> Any:
    body = {"prompt": prompt, "logprobs": 1} | parameters
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[Any]]:
    """Returns the answers of one mixed instance without a cache."""
    arguments = [MODEL, "--mixed", "1", *SMALL, "--no-enable-prefix-caching"]
    with (
        LocalServer(arguments) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        return {
            name: [complete(client, prompt, parameters) for prompt in prompts(12, seed=3)]
            for name, parameters in WAYS.items()
        }


WAYS = {"greedy": GREEDY, "sampled": SAMPLED, "penalised": PENALISED}


@pytest.mark.parametrize("way", WAYS)
def test_disaggregated_and_cached_equals_one_instance_without_cache(
    http: httpx.Client, expected: dict[str, list[Any]], way: str
) -> None:
    for _ in range(2):  # in the second round, prompts are cached
        with ThreadPoolExecutor(4) as pool:
            got = list(pool.map(lambda p: complete(http, p, WAYS[way]), prompts(12, seed=3)))
        assert got == expected[way]


def test_the_second_round_was_cached(http: httpx.Client, expected: dict[str, list[Any]]) -> None:
    body = {"prompt": prompts(12, seed=3)[-1], **GREEDY}
    usage = [http.post("/v1/completions", json=body).json()["usage"] for _ in range(2)][1]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 16 - 1
    assert usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]


@pytest.mark.long
def test_over_tcp_the_answers_are_the_same(tmp_path: Any, expected: dict[str, list[Any]]) -> None:
    config = tmp_path / "tcp.toml"
    config.write_text("[network]\nuse_shared_memory = false\n")
    arguments = [MODEL, "--prefill", "2", "--decode", "1", *SMALL, "--config", str(config)]
    with (
        LocalServer(arguments) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):
        got = [complete(client, prompt, GREEDY) for prompt in prompts(12, seed=3)]
        assert got == expected["greedy"]

        def received() -> dict[str, float]:
            found = re.findall(
                r'transfer_bytes_total{.*transport="(\w+)"} (\S+)', client.get("/metrics").text
            )
            return {name: float(count) for name, count in found}

        wait_until(lambda: received().get("tcp"))  # until a heartbeat brings the count
        assert {name for name, count in received().items() if count} == {"tcp"}


def test_openai_client_streams_and_counts(cluster: LocalServer) -> None:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    messages: Any = [{"role": "user", "content": "abc" * 50}]
    stream = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=10,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = list(stream)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 10
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    whole = client.chat.completions.create(
        model=MODEL,
        messages=messages,
        max_tokens=10,
        temperature=0,
        extra_body={"ignore_eos": True},
    )
    assert whole.choices[0].message.content == text
    assert whole.choices[0].finish_reason == "length"


def test_tenants_do_not_share_blocks(http: httpx.Client) -> None:
    body = {"prompt": [7] * 200, **GREEDY}
    cached = [
        http.post("/v1/completions", json=body | {"cache_salt": salt}).json()["usage"][
            "prompt_tokens_details"
        ]["cached_tokens"]
        for salt in ("alice", "alice", "bob")
    ]
    assert cached[0] == 0
    assert cached[1] > 150
    assert cached[2] == 0


def test_explain_says_where_and_why(http: httpx.Client) -> None:
    body = {"prompt": list(range(100)), **GREEDY}
    answered = http.post("/v1/completions", json=body, headers={"X-Request-Id": "explain-me"})
    assert answered.headers["x-request-id"] == "explain-me"
    explained = http.get("/explain/explain-me").json()
    assert explained["outcome"] == "length"
    # A short prompt may run in a decode batch if the Conductor expects it to end sooner there.
    assert explained["prefill_instance"].startswith(("prefill-", "decode-"))
    assert explained["decode_instance"].startswith("decode-")
    assert explained["generated_tokens"] == 24
    total_s = explained["since_arrival_s"]["finished"]
    assert sum(explained["stages_s"].values()) == pytest.approx(total_s, rel=0.05)


def test_what_was_learned_is_shown_and_can_be_simulated(
    cluster: LocalServer, http: httpx.Client, tmp_path: Any
) -> None:
    for start in range(30):
        body = {"prompt": list(range(start, start + 120)), **GREEDY}
        assert http.post("/v1/completions", json=body).status_code == 200
    metrics = http.get("/metrics").text
    assert 'moonpool:predictions_total{engine="' in metrics
    assert 'quantity="decoding"' in metrics
    assert 'moonpool:learned_decode_factor{engine="0",instance="decode-0"' in metrics
    seen = http.get("/cluster").json()["predictions"]
    assert seen["ttft_s"]["count"] >= 30 and seen["tbt_s"]["ratio_p50"] > 0
    path = tmp_path / "beliefs.json"
    run_command("profile", cluster.url, "--beliefs", "--json", str(path)).check_returncode()
    record = parse_beliefs(path.read_bytes())
    assert {each.instance_id for each in record.instances} >= {"prefill-0", "decode-1"}
    assert any(each.decode for each in record.instances)


def test_an_slo_that_cannot_be_met_is_refused_before_any_work(http: httpx.Client) -> None:
    body = {"prompt": [8] * 400, **GREEDY}
    headers = {"x-slo-ttft-ms": "0.001", "X-Request-Id": "too-late"}
    refused = http.post("/v1/completions", json=body, headers=headers)
    assert refused.status_code == 422
    # because not even an idle cluster could serve it, waiting does not help
    assert "retry-after" not in refused.headers
    error = refused.json()["error"]
    assert error["code"] == "ttft_slo"
    assert "SLO" in error["message"]
    explained = http.get("/explain/too-late").json()
    assert explained["outcome"] == "ttft_slo"
    assert explained["prefill_instance"] is None
    refused = http.post("/v1/completions", json=body, headers={"x-slo-tpot-ms": "0.001"})
    assert refused.json()["error"]["code"] == "decode_load_predicted"
    assert "moonpool:requests_rejected_total" in http.get("/metrics").text


def test_many_choices_of_many_prompts(http: httpx.Client) -> None:
    prompts = [[1] * 100, [2] * 30, [1] * 100]
    body = {"prompt": prompts, "n": 2, **SAMPLED}
    choices = http.post("/v1/completions", json=body).json()["choices"]
    assert [c["index"] for c in choices] == list(range(6))
    assert choices[0]["text"] == choices[4]["text"]  # has the same prompt and seed
    assert choices[0]["text"] != choices[1]["text"]  # has the next seed
    alone = http.post("/v1/completions", json={"prompt": prompts[1], **SAMPLED}).json()
    assert alone["choices"][0]["text"] == choices[2]["text"]


def test_a_client_that_goes_away_leaves_no_blocks_behind(http: httpx.Client) -> None:
    body = {"prompt": [5] * 300, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    for _ in range(3):
        with http.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            next(response.iter_lines())
    wait_until_idle(http)
