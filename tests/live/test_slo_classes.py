"""A server places, refuses, counts and logs calls by their classes of service levels."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from moonpool_lab.demo.local_server import LocalServer as AnyServer
from tests.forked.commands import LocalServer, run_command
from tests.live.conftest import MODEL, SMALL

KEYS = "sk-ann ann\nsk-bob bob\n"
CLASSES = ["--slo-class", "chat=60,20", "--slo-class", "never=0.000001,20"]
BY_TENANT = ["--slo-class", "ann=90,30"]
BODY = {"prompt": [7] * 20, "max_tokens": 4, "ignore_eos": True, "temperature": 0}
PATIENCE_S = 300.0


def ask(server: AnyServer, key: str, request_id: str, **headers: str) -> httpx.Response:
    own = {name.replace("_", "-"): text for name, text in headers.items()}
    own |= {"authorization": f"Bearer {key}", "x-request-id": request_id}
    return httpx.post(f"{server.url}/v1/completions", json=BODY, headers=own, timeout=120)


def explain(server: AnyServer, key: str, request_id: str) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.get(f"{server.url}/explain/{request_id}", headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def counted(server: AnyServer) -> dict[str, dict[str, float]]:
    """Returns values by metric name without its prefix, and by class."""
    found: dict[str, dict[str, float]] = {}
    for line in httpx.get(f"{server.url}/metrics", timeout=60).text.splitlines():
        if line.startswith("moonpool:slo_class_"):
            metric = line.removeprefix("moonpool:slo_class_").partition("_total")[0]
            name = line.partition('slo_class="')[2].partition('"')[0]
            found.setdefault(metric, {})[name] = float(line.rpartition(" ")[2])
    return found


def logged(server: AnyServer, number: int) -> list[dict[str, Any]]:
    """Waits until the log has this many ended requests, and returns their lines."""
    until_s = time.monotonic() + PATIENCE_S
    while True:
        lines = [json.loads(line) for line in server.log_lines() if line.startswith("{")]
        ended = [line for line in lines if "outcome" in line]
        if len(ended) >= number or time.monotonic() > until_s:
            return ended
        time.sleep(0.1)


@pytest.mark.live
@pytest.mark.parametrize("fronts", ["1", pytest.param("2", marks=pytest.mark.long)])
def test_requests_are_held_to_the_levels_of_their_class(fronts: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEYS)
    line = [MODEL, "--mixed", "1", *SMALL, "--fronts", fronts, *CLASSES, *BY_TENANT]
    line += ["--api-key-file", str(tmp_path / "keys"), "--log-requests", "--log-format", "json"]
    with LocalServer(line) as server:
        calls = (
            ("ann", "sk-ann", {}),
            ("default", "sk-bob", {}),
            ("chat", "sk-ann", {"x_slo_class": "chat"}),
            ("chat", "sk-bob", {"x_slo_class": "chat"}),
            ("default", "sk-ann", {"x_slo_class": "default"}),
        )
        for number, (name, key, headers) in enumerate(calls):
            assert ask(server, key, f"r{number}", **headers).status_code == 200
            assert explain(server, key, f"r{number}")["slo_class"] == name
        levels = explain(server, "sk-ann", "r0")["slo"]
        assert levels == {"ttft_s": 90.0, "tbt_s": 30.0, "assumed": []}
        refused = ask(server, "sk-bob", "late", x_slo_class="never")
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "ttft_slo")
        assert ask(server, "sk-bob", "typo", x_slo_class="chats").status_code == 400
        ended = [(one["tenant"], one["slo_class"]) for one in logged(server, 6)]
        metrics, lines = counted(server), server.log_lines()
    served = {"ann": 1, "default": 2, "chat": 2, "never": 0}
    asked = [(key.removeprefix("sk-"), name) for name, key, _ in calls]
    assert ended == [*asked, ("bob", "never")]
    assert metrics == {
        "requests": served | {"never": 1},
        "effective_requests": served,
        "rejections": dict.fromkeys(served, 0) | {"never": 1},
    }
    log = tmp_path / "server.log"
    log.write_text("\n".join(lines))
    figures = tmp_path / "figures.json"
    simulated = ["simulate", "--trace", str(log), "--mixed", "1", *CLASSES, *BY_TENANT]
    done = run_command(*simulated, "--json", str(figures), timeout_s=120.0)
    assert done.returncode == 0, done.stderr
    found = json.loads(figures.read_bytes())["slo_classes"]
    assert {name: one["effective"] for name, one in found.items()} == {"ann": 1, "chat": 2}
