"""Serves with instances of several processes: answers are right, and no process outlives
another."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.forked.commands import LocalServer
from tests.live.conftest import MODEL, SMALL, children_of
from tests.live.test_faults import LONG, answer_while_killing, wait_for_instances, wait_until_gone
from tests.live.waiting import WAIT_S, wait_until

PROMPTS = [[(i * j) % 251 for j in range(1, 40 + 90 * i)] for i in range(1, 6)]


def stages_of(pid: int) -> list[int]:
    return children_of(pid, "stage")


def processes_of(server: LocalServer) -> list[int]:
    """Returns the processes of the instances and all their stages."""
    workers = server.worker_pids()
    return [*workers, *(stage for pid in workers for stage in stages_of(pid))]


def ask(client: httpx.Client, prompt: list[int]) -> Any:
    body = {"prompt": prompt, "max_tokens": 20, "temperature": 0.9, "seed": 3, "logprobs": 1}
    return client.post("/v1/completions", json=body).json()["choices"][0]


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    sizes = ["--pipeline-parallel-size", "3", "--decode-pipeline-parallel-size", "2"]
    sizes += ["--no-inline-prefill", "--no-inline-chunks"]  # keeps decodes in steps without prompts
    with LocalServer([MODEL, "--prefill", "1", "--decode", "2", *sizes, *SMALL]) as server:
        yield server


@pytest.mark.long
def test_embeddings_of_stages_are_those_of_one_process(
    server: LocalServer, http: httpx.Client
) -> None:
    """Embeddings must be right while answers are decoded, for prompts of several chunks, and with
    cached blocks."""
    whole = http.post("/v1/embeddings", json={"input": PROMPTS}).json()["data"]
    with httpx.Client(base_url=server.url, timeout=60) as client, ThreadPoolExecutor() as pool:
        body = {"prompt": PROMPTS[0], "max_tokens": 16, "temperature": 0}
        answers = [pool.submit(client.post, "/v1/completions", json=body) for _ in range(3)]
        for _ in range(2):
            found = client.post("/v1/embeddings", json={"input": PROMPTS})
            assert found.status_code == 200, found.text
            assert found.json()["data"] == whole
        texts = {answer.result().json()["choices"][0]["text"] for answer in answers}
    assert texts == {http.post("/v1/completions", json=body).json()["choices"][0]["text"]}


def test_stages_answer_as_one_process_does(server: LocalServer, http: httpx.Client) -> None:
    """Answers to long prompts must be right: in chunks, streamed from three stages to two, then
    with cached blocks."""
    assert sorted(len(stages_of(pid)) for pid in server.worker_pids()) == [1, 1, 2]
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for prompt in PROMPTS:
            right = ask(http, prompt)
            assert ask(client, prompt) == right
            assert ask(client, prompt) == right

        def received() -> float:  # reads counters, which come with the heartbeat
            instances = client.get("/cluster").json()["instances"]
            return sum(i.get("counters", {}).get("received_bytes", 0) for i in instances)

        wait_until(received)
        instances = client.get("/cluster").json()["instances"]
    assert sorted(i["stages"] for i in instances) == [2, 2, 3]
    counters = [i.get("counters", {}) for i in instances]
    for name in ("corrupt_slices", "recomputed_tokens", "failed_streams"):
        assert not sum(c.get(name, 0) for c in counters), name


@pytest.mark.long
def test_a_killed_stage_takes_its_instance_and_costs_no_answer(server: LocalServer) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        expected = client.post("/v1/completions", json=LONG).json()["choices"][0]["text"]
        got = answer_while_killing(client, "decode", lambda pid: stages_of(pid)[-1])
        assert got["choices"][0]["text"] == expected
        assert wait_for_instances(client, 3)
    assert "stage 2 of 2" in server.last_words(200)


@pytest.mark.long
def test_stages_end_with_their_instance_and_with_the_head(server: LocalServer) -> None:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        assert wait_for_instances(client, 3)
        worker = server.worker_pids()[0]
        stages = stages_of(worker)
        os.kill(worker, signal.SIGKILL)
        assert stages and wait_until_gone([worker, *stages]) == []
        deadline = time.monotonic() + WAIT_S
        # The list names the killed instance until the head has noticed its end.
        while len(everyone := processes_of(server)) < 7 and time.monotonic() < deadline:
            time.sleep(0.2)
    assert len(everyone) == 7
    assert server.stop(signal.SIGINT) == 0
    assert wait_until_gone(everyone) == []
