"""Draining instances of real processes: answers continue, their only copies of blocks move
elsewhere, and no block stays held."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from moonpool.head.audit import audit_cluster
from tests.cli_runner import succeed
from tests.forked.commands import LocalServer
from tests.live.conftest import MODEL, SMALL
from tests.live.waiting import wait_until

PROMPT = {"prompt": [7] * 641, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
LONG = {"prompt": [9] * 200, "max_tokens": 400, "temperature": 1, "seed": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def server() -> Iterator[LocalServer]:
    with LocalServer([MODEL, "--mixed", "3", *SMALL]) as running:
        yield running


class Desk:
    """Sends requests to one server."""

    def __init__(self, server: LocalServer) -> None:
        self.url = server.url
        self.client = httpx.Client(base_url=server.url, timeout=60)

    def ask(self, body: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = self.client.post("/v1/completions", json=body).json()
        return found

    def cluster(self) -> dict[str, Any]:
        found: dict[str, Any] = self.client.get("/cluster").json()
        return found

    def names(self) -> list[str]:
        return [instance["instance_id"] for instance in self.cluster()["instances"]]

    def holders_of_prompt(self) -> list[str]:
        """Returns the instances that hold all the reused blocks of the prompt."""
        listed = self.client.get("/cluster/hot").json()["prefixes"]
        found: list[str] = next(one["dram"] for one in listed if one["tokens"] == 640)
        return found

    def pool(self, *arguments: str) -> str:
        done = succeed("pool", *arguments, "--url", self.url)
        return done.output


@pytest.mark.long
def test_instances_leave_and_their_cache_stays(server: LocalServer) -> None:
    desk = Desk(server)
    first = desk.ask(PROMPT)["choices"][0]["text"]
    for _ in range(3):
        assert desk.ask(PROMPT)["choices"][0]["text"] == first
    (holder,) = desk.holders_of_prompt()
    listed = desk.pool("ls")
    assert holder in listed and "640" in listed
    with pytest.raises(AssertionError, match="no instance 'nobody'"):
        desk.pool("drain", "nobody")

    expected = desk.ask(LONG)["choices"][0]["text"]
    answers: list[str] = []
    over = threading.Event()

    def go_on() -> None:
        while not over.is_set():
            answers.append(desk.ask(LONG)["choices"][0]["text"])
            assert audit_cluster(desk.cluster()) == [], "balanced at any moment"

    threads = [threading.Thread(target=go_on) for _ in range(3)]
    for thread in threads:
        thread.start()
    said = desk.pool("drain", holder, "--within", "20")
    assert "has left; others took" in said and " 0 of its blocks" not in said
    assert holder not in desk.names()
    again = desk.ask(PROMPT)
    assert again["choices"][0]["text"] == first
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 600
    takers = desk.holders_of_prompt()
    assert holder not in takers
    leaver = next(i for i in desk.cluster()["instances"] if i["instance_id"] == takers[0])
    os.kill(leaver["pid"], signal.SIGTERM)
    wait_until(lambda: leaver["instance_id"] not in desk.names())
    over.set()
    for thread in threads:
        thread.join(60)
    assert answers and set(answers) == {expected}, "no answer changed, none was lost"
    assert desk.ask(PROMPT)["usage"]["prompt_tokens_details"]["cached_tokens"] >= 600
    cluster = desk.cluster()
    assert cluster["drains"]["left"] == 2
    with pytest.raises(AssertionError, match="start another first"):
        desk.pool("drain", desk.names()[0])
    time.sleep(2.5)  # two heartbeats later, the drained instances are still away
    assert len(desk.names()) == 1
    wait_until(lambda: audit_cluster(desk.cluster()) == [])


def test_the_last_instance_of_a_role_is_replaced_when_it_is_told_to_end() -> None:
    """An operator who drains all instances gets them back, because a server without an instance
    serves nobody."""
    with LocalServer([MODEL, "--prefill", "1", "--decode", "1", *SMALL]) as server:
        desk = Desk(server)
        first = desk.ask(LONG)
        answers: list[dict[str, Any]] = []
        asking = threading.Thread(target=lambda: answers.append(desk.ask(LONG)))
        asking.start()
        wait_until(lambda: desk.cluster()["requests_under_way"] > 0)
        for name in ("decode-0", "prefill-0"):
            (pid,) = [i["pid"] for i in desk.cluster()["instances"] if i["instance_id"] == name]
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda name=name, pid=pid: _is_another(desk, name, pid))  # type: ignore[misc]
        asking.join()
        assert answers[0]["choices"] == first["choices"], "an answer under way goes on"
        assert desk.ask(LONG)["choices"] == first["choices"]
        log = "\n".join(server.log_lines())
        ready = desk.client.get("/ready")
    for name in ("decode-0", "prefill-0"):
        assert f"WARNING {name} was told to end, and is the last instance that" in log
    assert ready.json() == {"ready": True, "reason": None}


def _is_another(desk: Desk, name: str, former: int) -> bool:
    pids = [i["pid"] for i in desk.cluster()["instances"] if i["instance_id"] == name]
    return bool(pids) and pids[0] != former
