"""Log lines of a real cluster are JSON from every process, with one line per request that has its
times."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest

from tests.forked.commands import LocalServer
from tests.live.calls import fresh
from tests.live.conftest import MODEL, SMALL

PATIENCE_S = 300.0
BODY = {"prompt": list(range(5, 105)), "max_tokens": 4, "temperature": 0, "ignore_eos": True}


def complete(server: LocalServer, request_id: str) -> None:
    headers = {"X-Request-Id": request_id}
    answer = fresh.post(f"{server.url}/v1/completions", json=BODY, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text


def lines_until(server: LocalServer, holds: Callable[[list[str]], bool]) -> list[str]:
    until_s = time.monotonic() + PATIENCE_S
    while True:
        lines = server.log_lines()
        if holds(lines) or time.monotonic() > until_s:
            return lines
        time.sleep(0.1)


def test_json_lines_of_all_processes_and_of_a_request() -> None:
    flags = ["--log-format", "json", "--log-requests", "--log-level", "debug"]
    with LocalServer([MODEL, *SMALL, *flags]) as server:
        complete(server, "logged-1")
        found = lines_until(server, lambda lines: any("request logged-1" in line for line in lines))
        parsed: list[dict[str, Any]] = [json.loads(line) for line in found]
    assert {"head", "prefill-0", "decode-0"} <= {line["process"] for line in parsed}
    for line in parsed:
        assert datetime.fromisoformat(line["time"]).tzinfo is not None
        assert {"level", "pid", "logger", "message"} <= line.keys()
    ended = next(line for line in parsed if line.get("request_id") == "logged-1")
    assert (ended["outcome"], ended["prompt_tokens"]) == ("length", 100)
    assert (ended["prefill"], ended["decode"]) == ("prefill-0", "decode-0")
    assert abs(sum(ended["stages_s"].values()) - ended["total_s"]) < 1e-3


@pytest.mark.long
def test_text_lines_have_iso_dates_and_requests_are_logged_on_demand_only() -> None:
    with LocalServer([MODEL, *SMALL, "--log-level", "info"]) as server:
        complete(server, "unlogged-1")
        assert fresh.get(f"{server.url}/explain/unlogged-1", timeout=60).status_code == 200
        lines = server.log_lines()
    assert any(re.match(r"\d{4}-\d\d-\d\dT[\d:.]+Z head INFO serving ", line) for line in lines)
    assert not any("unlogged-1" in line for line in lines)


@pytest.mark.long
def test_a_start_says_what_it_does() -> None:
    with LocalServer([MODEL, *SMALL]) as server:
        lines = server.log_lines()
        text = "\n".join(lines)
        assert f"INFO serving {MODEL} at {server.url} " in text
    for wanted in (
        rf"decode-0 INFO loading {MODEL}",
        r"prefill-0 INFO measuring step times",
        r"head INFO 0 of 2 instances are up",
        r"head INFO 2 of 2 instances are up",
    ):
        assert re.search(wanted, text), f"{wanted} is not in {text}"


@pytest.mark.long
def test_a_start_is_quiet_at_a_higher_level() -> None:
    with LocalServer([MODEL, *SMALL, "--log-level", "error"]) as server:
        assert server.log_lines() == []
