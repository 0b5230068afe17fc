"""Serves with instances whose processes share every layer: answers are right at every degree, and
no process outlives another."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.forked.commands import LocalServer
from tests.live.calls import fresh
from tests.live.conftest import MODEL, SMALL, children_of
from tests.live.test_drain import wait_until
from tests.live.test_faults import LONG, answer_while_killing, wait_for_instances, wait_until_gone

STREAMED = ("--no-inline-prefill", "--no-inline-chunks")
"""Keeps prompts on prefill instances: a slow machine's decode instance would compute these
prompts."""
PROMPTS = [[(i * j) % 251 for j in range(1, 40 + 90 * i)] for i in range(1, 6)]


def ranks_of(pid: int) -> list[int]:
    return children_of(pid, "rank")


def ask(client: httpx.Client, prompt: list[int]) -> Any:
    body = {"prompt": prompt, "max_tokens": 20, "temperature": 0.9, "seed": 3, "logprobs": 1}
    return client.post("/v1/completions", json=body).json()["choices"][0]


def instances_that_received(client: httpx.Client) -> list[dict[str, Any]]:
    """Returns the cluster's instances when heartbeats have brought their counts of received
    blocks."""
    found: list[dict[str, Any]] = []

    def some_received() -> bool:
        found[:] = client.get("/cluster").json()["instances"]
        return sum(one.get("counters", {}).get("received_bytes", 0) for one in found) > 0

    wait_until(some_received)
    return found


@pytest.fixture(scope="module")
def reverse() -> Iterator[LocalServer]:
    """Serves with a prefill instance of one rank and two decode instances of two ranks, so that one
    goes on if the other ends."""
    args = [
        MODEL,
        "--prefill",
        "1",
        "--decode",
        "2",
        "--decode-tensor-parallel-size",
        "2",
        *SMALL,
        *STREAMED,
    ]
    with LocalServer(args) as server:
        yield server


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    """Serves with a prefill instance of two ranks and a decode instance of one rank."""
    args = [
        MODEL,
        "--prefill",
        "1",
        "--decode",
        "1",
        "--tensor-parallel-size",
        "2",
        *SMALL,
        *STREAMED,
    ]
    with LocalServer(args) as server:
        yield server


@pytest.mark.long
def test_the_degrees_do_not_change_a_bit(server: LocalServer, reverse: LocalServer) -> None:
    """Whether long prompts give the same logprobs bit for bit: in chunks, streamed from two ranks
    to one and from one to two, then from the cache."""
    assert sorted(len(ranks_of(pid)) for pid in server.worker_pids()) == [0, 1]
    with (
        httpx.Client(base_url=server.url, timeout=60) as client,
        httpx.Client(base_url=reverse.url, timeout=60) as other,
    ):
        for prompt in PROMPTS:
            right = ask(client, prompt)
            assert ask(client, prompt) == right
            assert ask(other, prompt) == right
            assert ask(other, prompt) == right
        found = [instances_that_received(c) for c in (client, other)]
    assert [sorted(i["ranks"] for i in f) for f in found] == [[1, 2], [1, 2, 2]]
    for instances in found:
        counters = [i.get("counters", {}) for i in instances]
        for name in ("corrupt_slices", "recomputed_tokens", "failed_streams"):
            assert not sum(c.get(name, 0) for c in counters), name


def test_one_process_without_shards_answers_alike(server: LocalServer, http: httpx.Client) -> None:
    """Whether the logprobs are equal up to rounding: sums of one process are rounded once, sums
    over two shards three times."""
    body = {"prompt": PROMPTS[2], "max_tokens": 1, "temperature": 0.0, "logprobs": 1}
    with httpx.Client(base_url=server.url, timeout=60) as client:
        found = [c.post("/v1/completions", json=body).json() for c in (client, http)]
    got, right = (f["choices"][0]["logprobs"]["token_logprobs"][0] for f in found)
    assert got == pytest.approx(right, abs=0.05)


@pytest.mark.long
def test_embeddings_of_ranks(server: LocalServer, reverse: LocalServer, http: httpx.Client) -> None:
    """Whether the bits are equal with any number of ranks; sums over shards differ from the sums of
    one process."""
    body = {"input": [*PROMPTS, "beside it"]}
    found = [fresh.post(f"{s.url}/v1/embeddings", json=body, timeout=60) for s in (server, reverse)]
    assert found[0].status_code == 200, found[0].text
    assert found[0].json()["data"] == found[1].json()["data"]
    whole = http.post("/v1/embeddings", json=body).json()["data"]
    # the dtype that the server chose for this CPU
    dtype = http.get("/server_info").json()["config"]["model"]["dtype"]
    rounding = 1e-5 if dtype == "float32" else 5e-3
    for ours, alone in zip(found[0].json()["data"], whole, strict=True):
        assert ours["embedding"] == pytest.approx(alone["embedding"], abs=rounding)


@pytest.mark.long
def test_a_killed_rank_takes_its_instance_and_costs_no_answer(reverse: LocalServer) -> None:
    with httpx.Client(base_url=reverse.url, timeout=60) as client:
        expected = client.post("/v1/completions", json=LONG).json()["choices"][0]["text"]
        got = answer_while_killing(client, "decode", lambda pid: ranks_of(pid)[-1])
        assert got["choices"][0]["text"] == expected
        assert wait_for_instances(client, 3)
    assert "rank 2 of 2" in reverse.last_words(200)


def test_ranks_end_with_the_head(server: LocalServer) -> None:
    workers = server.worker_pids()
    everyone = [*workers, *(rank for pid in workers for rank in ranks_of(pid))]
    assert len(everyone) == 3
    assert server.stop(signal.SIGINT) == 0
    assert wait_until_gone(everyone) == []
