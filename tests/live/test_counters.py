"""Reads counters of a live cluster after every kind of end: an end that is not damage counts as
none."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from moonpool_lab.replay.server import parse_metrics
from tests.forked.commands import LocalServer
from tests.live.conftest import MODEL, SMALL
from tests.live.test_faults import wait_for_instances
from tests.live.waiting import WAIT_S, wait_until

PROMPT_TOKENS = 4000
CORRUPT = "moonpool:corrupt_slices_total"
BEATS_S = 2.5
"""The time within which an instance that has something to do reports its counters."""


def counters(client: httpx.Client) -> dict[str, float]:
    return parse_metrics(client.get("/metrics").text)


def ends(found: dict[str, float]) -> dict[str, float]:
    """Returns how many requests ended in each way."""
    names = ("vllm:request_success_total", "moonpool:requests_")
    return {name: n for name, n in found.items() if name.startswith(names) and n}


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    found = {name: n - before.get(name, 0.0) for name, n in ends(after).items()}
    return {name: n for name, n in found.items() if n}


def prompt(number: int) -> list[int]:
    """Returns a prompt that no cache has."""
    return [(number * 37 + place * place) % 290 + 1 for place in range(PROMPT_TOKENS)]


def state_of(client: httpx.Client, name: str) -> str:
    response = client.get(f"/explain/{name}")
    if response.status_code != 200:
        return "unknown"
    record = response.json()
    if record["outcome"] != "running":
        return "ended"
    if record["generated_tokens"]:
        return "decode"
    since = record["since_arrival_s"]
    if "prefill_started" in since:
        return "transfer" if "prefill_done" in since else "prefill"
    return "queue"


def leave(client: httpx.Client, url: str, number: int, state: str) -> bool:
    """Sends a request whose client leaves in this state. Returns whether the request ended because
    of that."""
    name = f"leaves-{state}-{number}"
    body = {"prompt": prompt(number), "max_tokens": 500, "ignore_eos": True, "stream": True}
    gone = threading.Event()
    sock: dict[str, httpx.Client] = {}

    def ask() -> None:
        with httpx.Client(base_url=url, timeout=60) as own:
            sock["own"] = own
            try:
                headers = {"X-Request-Id": name}
                with own.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
                    for _ in answer.iter_raw():
                        if gone.is_set():
                            return
            except (httpx.HTTPError, RuntimeError):
                return

    thread = threading.Thread(target=ask)
    thread.start()
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        now = state_of(client, name)
        if now == state or now == "ended":
            break
    gone.set()
    sock["own"].close()  # ends the request whatever it waits for
    thread.join(60)
    while state_of(client, name) not in ("ended", "unknown"):
        assert time.monotonic() < deadline, "it goes on without its client"
        time.sleep(0.01)
    return bool(client.get(f"/explain/{name}").json()["outcome"] == "abort")


def test_clients_that_leave_and_answers_that_stop(cluster: LocalServer, http: httpx.Client) -> None:
    before, num_aborted = counters(http), 0
    states = ("queue", "prefill", "prefill", "transfer", "decode", "prefill")
    for number, state in enumerate(states):
        num_aborted += leave(http, cluster.url, 7000 + number, state)
    headers = {"X-Request-Timeout-Ms": "60"}
    body = {"prompt": prompt(7100), "max_tokens": 500, "ignore_eos": True}
    late = http.post("/v1/completions", json=body, headers=headers).status_code
    chat = {"prompt": [5, 6, 7], "max_tokens": 64, "temperature": 1.0, "seed": 3}
    text = http.post("/v1/completions", json=chat).json()["choices"][0]["text"]
    stopped = http.post("/v1/completions", json={**chat, "stop": text[len(text) // 2]}).json()
    assert stopped["choices"][0]["finish_reason"] == "stop"
    num_asked = len(states) + 3
    wait_until(lambda: sum(grown(before, counters(http)).values()) >= num_asked)
    time.sleep(BEATS_S)  # waits until the damage so far has been reported
    after = counters(http)
    assert after[CORRUPT] == before[CORRUPT] == 0, "a departed client damages no memory"
    found = grown(before, after)
    assert found.get("moonpool:requests_failed_total{abort}", 0) == num_aborted > 0
    assert sum(found.values()) == num_asked, found
    assert found.get("vllm:request_success_total{stop}", 0) >= 1
    deadlines = (
        "moonpool:requests_failed_total{deadline}",
        "moonpool:requests_rejected_total{deadline}",
    )
    assert sum(found.get(name, 0) for name in deadlines) == (late == 504)


def ask_meanwhile(client: httpx.Client, number: int, act: Callable[[str], Any]) -> dict[str, Any]:
    """Sends a long request, and acts while the request is under way."""
    got: dict[str, Any] = {}
    name = f"meanwhile-{number}"

    def ask() -> None:
        body = {"prompt": prompt(number), "max_tokens": 200, "ignore_eos": True}
        headers = {"X-Request-Id": name}
        got.update(client.post("/v1/completions", json=body, headers=headers).json())

    thread = threading.Thread(target=ask)
    thread.start()
    deadline = time.monotonic() + WAIT_S
    while state_of(client, name) not in ("prefill", "transfer", "decode", "ended"):
        assert time.monotonic() < deadline
    act(name)
    thread.join(120)
    assert got["usage"]["completion_tokens"] == 200, got
    return got


@pytest.mark.long
def test_lost_instances_and_a_dead_head_damage_nothing() -> None:
    """Whether kills of each kind of process, and a drain, have a counter each, and none counts as
    damage."""
    with LocalServer([MODEL, "--prefill", "1", "--decode", "1", *SMALL]) as server:
        client = httpx.Client(base_url=server.url, timeout=120)

        def pid_of(name: str) -> int:
            found = client.get("/cluster").json()
            return int(
                found["head"]["pid"]
                if name == "head"
                else next(i["pid"] for i in found["instances"] if i["instance_id"] == name)
            )

        def kill(name: str) -> Callable[[str], None]:
            return lambda _: os.kill(pid_of(name), signal.SIGKILL)

        for number, victim in enumerate(("prefill-0", "decode-0", "prefill-0", "decode-0")):
            ask_meanwhile(client, 100 + number, kill(victim))
            assert wait_for_instances(client, 2)
        found = counters(client)
        for name in ("prefill-0", "decode-0"):
            assert found[f"moonpool:instance_losses_total{{{name}}}"] == 2
            assert found[f"moonpool:instance_restarts_total{{{name}}}"] == 2
        assert found["vllm:request_success_total{length}"] == 4
        drain = {"instance_id": "decode-0", "within_s": 5.0, "returns": True}
        assert client.post("/cluster/drain", json=drain).status_code == 200
        deadline = time.monotonic() + WAIT_S
        while counters(client)["moonpool:instance_restarts_total{decode-0}"] < 3:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        found = counters(client)
        assert found["moonpool:instance_losses_total{decode-0}"] == 2, "it left in order"
        started_s, before = found["process_start_time_seconds"], found
        ask_meanwhile(client, 200, kill("head"))
        assert wait_for_instances(client, 2)
        time.sleep(BEATS_S)
        found = counters(client)
        assert found["process_start_time_seconds"] > started_s
        assert (before["moonpool:head_restarts_total"], found["moonpool:head_restarts_total"]) == (
            0,
            1,
        )
        assert found[CORRUPT] == before[CORRUPT] == 0
        assert sum(ends(found).values()) <= 2, "the answer that went on, and what else was asked"
        assert found.get("moonpool:instance_losses_total{decode-0}", 0) == 0
