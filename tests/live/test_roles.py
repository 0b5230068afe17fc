"""Real processes change their role while they serve: answers stay right, even if an instance is
killed during the change."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.forked.commands import LocalServer
from tests.live.conftest import MODEL, SMALL
from tests.live.waiting import wait_until

LONG = {"prompt": [9] * 300, "max_tokens": 500, "temperature": 1, "seed": 5, "ignore_eos": True}
LONG_PROMPTS, LONG_ANSWERS = (4000, 1), (300, 500)
IMPOSSIBLE = {"x-slo-ttft-ms": "0.01"}
"""Sends a request that is refused: it costs no compute, but counts as demand."""


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    """Runs a server for each test: an instance that switched in one test could not switch again in
    the next."""
    config: Path = tmp_path_factory.mktemp("roles") / "roles.toml"
    config.write_text("[conductor]\nrole_balance_window_s = 3\n")
    arguments = [MODEL, "--prefill", "1", "--decode", "3", "--role-balance", "switch"]
    with LocalServer([*arguments, "--config", str(config), *SMALL]) as running:
        yield running


class Desk:
    """Asks questions to one server."""

    def __init__(self, server: LocalServer) -> None:
        self.client = httpx.Client(base_url=server.url, timeout=60)

    def answer(self) -> str:
        text: str = self.client.post("/v1/completions", json=LONG).json()["choices"][0]["text"]
        return text

    def cluster(self) -> dict[str, Any]:
        found: dict[str, Any] = self.client.get("/cluster").json()
        return found

    def roles(self) -> list[str]:
        return [instance["role"] for instance in self.cluster()["instances"]]

    @contextmanager
    def asking(self, number: int) -> Iterator[list[str]]:
        """Keeps long answers under way, one after the other from each of this many clients."""
        answers: list[str] = []
        over = threading.Event()

        def ask() -> None:
            while not over.is_set():
                answers.append(self.answer())

        with _threads([ask] * number, over):
            yield answers

    @contextmanager
    def demanding(self, prompt_tokens: int, answer_tokens: int) -> Iterator[None]:
        """Asks for prompts and answers of these lengths in the background; the server refuses all
        of them."""
        over = threading.Event()

        def demand() -> None:
            for number in count():
                if over.is_set():
                    return
                body = {"prompt": [number % 250] * prompt_tokens, "max_tokens": answer_tokens}
                done = self.client.post("/v1/completions", json=body, headers=IMPOSSIBLE)
                assert done.status_code == 422
                time.sleep(0.01)

        with _threads([demand] * 3, over):
            yield


@contextmanager
def _threads(works: list[Callable[[], None]], over: threading.Event) -> Iterator[None]:
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(60)


@pytest.mark.long
def test_instances_change_sides_and_back_and_answers_stay_right(server: LocalServer) -> None:
    desk = Desk(server)
    expected = desk.answer()
    with desk.asking(2) as answers:
        with desk.demanding(*LONG_PROMPTS):
            wait_until(lambda: desk.roles().count("prefill") >= 2)
        before = len(answers)
        wait_until(lambda: len(answers) > before + 2)
        with desk.demanding(*LONG_ANSWERS):
            wait_until(lambda: desk.roles().count("decode") >= 3)
        before = len(answers)
        wait_until(lambda: len(answers) > before + 2)
    assert set(answers) == {expected}
    balance = desk.cluster()["role_balance"]
    assert balance["mode"] == "switch"
    assert balance["switches"]["prefill"] >= 1 and balance["switches"]["decode"] >= 1
    metrics = desk.client.get("/metrics").text
    assert "moonpool:role_switches_total{" in metrics and "moonpool:role_load{" in metrics


@pytest.mark.long
def test_an_instance_killed_in_its_new_role_costs_no_answer(server: LocalServer) -> None:
    """Whether answers of the former role end on the instance that switched."""
    desk = Desk(server)
    expected = desk.answer()
    killed: dict[str, int] = {}

    def kill_what_switched() -> bool:
        for found in desk.cluster()["instances"]:
            if found["role"] != found["instance_id"].split("-")[0]:
                os.kill(found["pid"], signal.SIGKILL)
                killed[found["instance_id"]] = found["pid"]
                return True
        return False

    def is_back() -> bool:
        now = {i["instance_id"]: i["pid"] for i in desk.cluster()["instances"]}
        return len(now) == 4 and all(now[name] != pid for name, pid in killed.items())

    with desk.asking(6) as answers, desk.demanding(*LONG_PROMPTS):
        wait_until(kill_what_switched)
    wait_until(is_back)
    assert set(answers) == {expected}
    assert desk.answer() == expected
